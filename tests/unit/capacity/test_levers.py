"""The inverse problem: order, what each lever brings, the smallest set, and what can't be reached."""

from __future__ import annotations

import pytest

from pipeline.capacity import GIB, Card, EngineRules, Geometry, Term, WeightScheme, rank_weight_bytes
from pipeline.capacity.levers import Planner, Setup
from tests.support.geometries import QWEN25_7B, SMOLLM2

SHAPE = Geometry.from_config(QWEN25_7B)
AWQ = WeightScheme("awq", 4, 128)
CARD = Card(int(23.64 * GIB), 0.92, (Term.exact("overhead", int(1.45 * GIB)),))
START = Setup("bf16", "bfloat16", 8192, 0.92)
PLANNER = Planner(
    SHAPE,
    {
        "bf16": lambda cards: rank_weight_bytes(SHAPE, tensor_parallel=cards)[0],
        "awq": lambda cards: rank_weight_bytes(SHAPE, AWQ, cards)[0],
    },
    CARD,
    EngineRules(),
)


def test_weights_come_first_and_kv_second_and_both_reach_60() -> None:
    answer = PLANNER.answer(START, 60, "awq", "fp8", 0.95)
    assert [lever.key for lever in answer.levers] == ["weights", "kv", "length", "utilization", "cards"]
    assert (answer.start, answer.levers[0].sequences, answer.levers[1].sequences) == (13, 34, 69)
    assert answer.smallest == ("awq weights", "fp8 KV cache")
    assert answer.levers[1].alone == 27  # the same lever without the first


def test_each_lever_on_top_never_takes_away() -> None:
    answer = PLANNER.answer(START, 150, "awq", "fp8", 0.95)
    found = [answer.start, *(lever.sequences for lever in answer.levers)]
    assert found == sorted(found)
    length = next(lever for lever in answer.levers if lever.key == "length")
    assert length.sequences >= 150
    assert answer.smallest is not None
    assert len(answer.smallest) == 3


def test_a_second_card_counts_only_where_nothing_else_reaches() -> None:
    pinned = Planner(
        SHAPE, {"bf16": lambda cards: rank_weight_bytes(SHAPE, tensor_parallel=cards)[0]}, CARD, EngineRules()
    )
    answer = pinned.answer(Setup("bf16", "fp8", 32, 0.92), 10**6, None, "fp8", 0.92)
    assert answer.smallest is None
    assert answer.closest == answer.levers[-1].sequences > answer.start
    answer = pinned.answer(Setup("bf16", "fp8", 16, 0.92), 20_000, None, "fp8", 0.92)
    assert answer.smallest == ("second card (tensor parallel 2)",)


def test_nothing_is_needed_where_it_fits() -> None:
    assert PLANNER.answer(START, 5, "awq", "fp8", 0.95).smallest == ()


def test_largest_length_for_the_streams_is_tight() -> None:
    setup = Setup("awq", "fp8", 8192, 0.92)
    longest = PLANNER.longest(setup, 60)
    assert longest is not None
    assert PLANNER.sequences(Setup("awq", "fp8", longest, 0.92)) >= 60
    assert PLANNER.sequences(Setup("awq", "fp8", longest + 16, 0.92)) < 60
    assert PLANNER.longest(setup, 10**9) is None


def test_weights_that_dont_fit_leave_nothing() -> None:
    small = Planner(
        SHAPE, {"bf16": lambda cards: rank_weight_bytes(SHAPE)[0]}, Card(8 * GIB, 0.9, ()), EngineRules()
    )
    assert small.sequences(START) == 0


def test_odd_heads_have_no_second_card() -> None:
    shape = Geometry.from_config(SMOLLM2)  # 9 heads
    planner = Planner(shape, {"bf16": lambda cards: rank_weight_bytes(shape)[0]}, CARD, EngineRules())
    answer = planner.answer(Setup("bf16", "bfloat16", 512, 0.92), 10**6, None, "fp8", 0.92)
    assert "cards" not in [lever.key for lever in answer.levers]


@pytest.mark.parametrize("required", [1, 13, 14, 34, 35, 69, 70, 200])
def test_the_smallest_set_really_reaches(required: int) -> None:
    answer = PLANNER.answer(START, required, "awq", "fp8", 0.95)
    assert answer.smallest is not None
    levers = {lever.change: lever for lever in answer.levers}
    if len(answer.smallest) == 1:
        assert levers[answer.smallest[0]].alone >= required
