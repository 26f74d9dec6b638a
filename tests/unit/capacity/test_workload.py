"""Expected concurrency against brute force: enumeration of all short sequences of lengths, and seeded simulation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pipeline.capacity import GIB, Card, EngineRules, Geometry, Row, plan_row
from pipeline.capacity.workload import Lengths, fit_probabilities, workload_capacity
from pipeline.errors import UserInputError
from tests.support.geometries import SMOLLM2

SHAPE = Geometry.from_config(SMOLLM2)


def row(budget_bytes: int, length: int = 512, block: int = 128) -> Row:
    card = Card(2 * GIB, 1.0, ())
    rules = EngineRules(block_size=block, kernel_block=32, concurrent_batches=1)
    return plan_row("v", "w", "bfloat16", SHAPE, (2 * GIB - budget_bytes,), card, rules, length)


def test_equal_lengths_give_the_worst_case() -> None:
    found = workload_capacity(row(100 * 2**20), Lengths((512,) * 7, "all the same"))
    assert found.expected == found.at_95 == found.worst_case == 8
    assert found.mean_waste_tokens == 0


def test_probabilities_equal_full_enumeration() -> None:
    blocks, share, usable = [1, 2, 4], [0.5, 0.3, 0.2], 7
    found = fit_probabilities(blocks, share, usable)
    for count in range(1, 8):
        exact = sum(
            np.prod([share[i] for i in chosen])
            for chosen in product(range(3), repeat=count)
            if sum(blocks[i] for i in chosen) <= usable
        )
        assert found[count - 1] == pytest.approx(exact, abs=1e-12)
    assert len(found) == 7


def test_expectation_agrees_with_simulation() -> None:
    lengths = Lengths.fitted(200, 450, 512)
    plan = row(400 * 2**20)
    found = workload_capacity(plan, lengths)
    generator = np.random.default_rng(3)
    usable, counts = plan.pool.blocks - 1, []
    for _ in range(4000):
        drawn = np.ceil(generator.choice(lengths.tokens, size=400) / 128).cumsum()
        counts.append(int(np.searchsorted(drawn, usable, side="right")))
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(found.expected - np.mean(counts)) < 4 * error
    assert np.mean(np.array(counts) >= found.at_95) >= 0.94
    assert found.worst_case < found.at_95 <= found.expected


def test_long_pools_take_the_fast_way_to_the_same_numbers() -> None:
    generator = np.random.default_rng(5)
    blocks = np.arange(1, 200)
    share = generator.dirichlet(np.ones(199))
    found = fit_probabilities(blocks, share, 1000)
    total = np.zeros(1001)
    total[0] = 1
    kernel = np.concatenate([[0.0], share])
    for probability in found[:8]:
        total = np.convolve(total, kernel)[:1001]
        assert probability == pytest.approx(total.sum(), abs=1e-9)


def test_fitted_lengths_have_the_mean_and_the_p95() -> None:
    found = Lengths.fitted(2000, 6000, 10**6)
    assert found.mean == pytest.approx(2000, rel=0.01)
    assert found.p95 == pytest.approx(6000, rel=0.01)


@pytest.mark.parametrize(
    ("mean", "p95", "message"), [(0, 5, "0 < mean < p95"), (5, 5, "0 < mean"), (10, 100, "at most 3.87")]
)
def test_impossible_fits_are_refused(mean: float, p95: float, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        Lengths.fitted(mean, p95, 8192)


def test_a_sequence_longer_than_max_model_len_is_refused() -> None:
    with pytest.raises(UserInputError, match="513 tokens, but max_model_len is 512"):
        workload_capacity(row(100 * 2**20), Lengths((513,), "one"))
    with pytest.raises(UserInputError, match="0 tokens"):
        workload_capacity(row(100 * 2**20), Lengths((0, 5), "two"))
