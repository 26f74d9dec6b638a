"""How many sequences of a real workload the pool holds at once, when their lengths vary.

Sequences are admitted one after another until the next one doesn't fit. With independent lengths the number N that fits has
P(N >= n) = P(S_n <= B), S_n the blocks of n sequences and B the pool's usable blocks, and E[N] is the sum of those over n.
S_n's distribution is the n-fold convolution of one sequence's, here computed exactly on the grid of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipeline.capacity.plan import Row
from pipeline.errors import UserInputError

QUANTILES = 4096
"""Points at which a fitted distribution is read."""
NEGLIGIBLE = 1e-12
"""A tail probability that ends the sum."""


@dataclass(frozen=True)
class Lengths:
    """Tokens per sequence, prompt and output, as a weighted list. `source` says where they are from."""

    tokens: tuple[int, ...]
    source: str

    @property
    def mean(self) -> float:
        return float(np.mean(self.tokens))

    @property
    def p95(self) -> float:
        return float(np.quantile(self.tokens, 0.95))

    @classmethod
    def fitted(cls, mean: float, p95: float, longest: int) -> Lengths:
        """The log-normal with this mean and 95th percentile, cut at `longest` tokens.

        exp(m + s*s/2) = mean and exp(m + z*s) = p95 give s = z - sqrt(z*z - 2*ln(p95/mean)), z = 1.645.
        """
        if not 0 < mean < p95:
            raise UserInputError(f"a workload of mean {mean:g} and p95 {p95:g} tokens: needs 0 < mean < p95")
        z = NormalDist().inv_cdf(0.95)
        room = z * z - 2 * math.log(p95 / mean)
        if room < 0:
            raise UserInputError(
                f"no log-normal has a p95 of {p95 / mean:.2f} times its mean (at most {math.exp(z * z / 2):.2f}); give the lengths as JSONL"
            )
        spread = z - math.sqrt(room)
        centre = math.log(mean) - spread * spread / 2
        points = (np.arange(QUANTILES) + 0.5) / QUANTILES
        normal = np.array([NormalDist().inv_cdf(point) for point in points])
        tokens = np.clip(np.ceil(np.exp(centre + spread * normal)), 1, longest).astype(int)
        return cls(
            tuple(int(value) for value in tokens),
            f"log-normal, mean {mean:g}, p95 {p95:g}, cut at {longest:,}",
        )


@dataclass(frozen=True)
class WorkloadCapacity:
    """How many sequences fit at once: on average, and for sure at a probability."""

    expected: float
    at_95: int
    """The largest n that fits with a probability of at least 0.95."""
    worst_case: int
    """All at max_model_len."""
    mean_waste_tokens: float
    """Expected room left in a sequence's last block."""


def workload_capacity(row: Row, lengths: Lengths) -> WorkloadCapacity:
    """Sequences of `lengths` that the row's pool holds; `UserInputError` where one is longer than max_model_len."""
    longest = max(lengths.tokens)
    if longest > row.pool.max_model_len:
        raise UserInputError(
            f"the workload has a sequence of {longest:,} tokens, but max_model_len is {row.pool.max_model_len:,}"
        )
    if min(lengths.tokens) < 1:
        raise UserInputError("the workload has a sequence of 0 tokens or less")
    usable = max(0, row.pool.blocks - 1)
    values, counts = np.unique(np.array(lengths.tokens), return_counts=True)
    blocks = np.array([row.layout.blocks_for(int(value)) for value in values])
    at_least = fit_probabilities(blocks, counts / counts.sum(), usable)
    size = row.layout.block_size
    waste = float(np.sum((-values % size) * counts) / counts.sum())
    return WorkloadCapacity(
        expected=float(np.sum(at_least)),
        at_95=int(np.sum(at_least >= 0.95)),
        worst_case=row.pool.fitting_sequences,
        mean_waste_tokens=waste,
    )


def fit_probabilities(
    blocks: NDArray[np.int64] | Sequence[int], share: NDArray[np.float64] | Sequence[float], usable: int
) -> NDArray[np.float64]:
    """P(n sequences fit) for n = 1, 2, … until it is negligible.

    Args:
        blocks: shape (k,), blocks of the k kinds of sequence, all positive.
        share: shape (k,), their shares, summing to 1.
        usable: blocks of the pool, the null block deducted.
    """
    blocks, share = np.asarray(blocks), np.asarray(share, dtype=float)
    one = np.zeros(usable + 1)
    np.add.at(one, blocks[blocks <= usable], share[blocks <= usable])
    kernel = np.trim_zeros(one, "b")
    found: list[float] = []
    total = np.zeros(usable + 1)
    total[0] = 1.0
    while kernel.size:
        total = _convolve(total, kernel)[: usable + 1]
        probability = float(total.sum())
        if probability < NEGLIGIBLE:
            break
        found.append(min(1.0, probability))
    return np.array(found)


def _convolve(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear convolution, clipped at zero against rounding; by FFT where both are long."""
    if min(first.size, second.size) < 64:
        return np.convolve(first, second)
    from scipy.signal import fftconvolve

    found: NDArray[np.float64] = np.clip(fftconvolve(first, second), 0.0, None)
    return found
