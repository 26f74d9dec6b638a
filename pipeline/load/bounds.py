"""How many over-limit requests a sample may hold before a latency limit counts as met: the binomial bound.

MLPerf's early stopping (MLCommons inference rules, "Early Stopping Criterion"): with `over` of `n` requests above the
limit, "the p-th percentile meets the limit" may be claimed when so few would be seen with probability at most
1 - confidence if the true share above it were 1 - p. Failing is the same statement turned round; between the two the
sample doesn't decide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pipeline.errors import UserInputError

Bound = Literal["pass", "fail", "undecided"]


def latency_bound(n: int, over: int, percentile: float, confidence: float = 0.99) -> Bound:
    """Does the `percentile` (0..1) of latency meet its limit, seeing `over` of `n` requests above it?

    'pass': P[X <= over] <= 1 - confidence for X ~ Binomial(n, 1 - percentile). 'fail': P[X >= over] <= 1 - confidence.
    Else 'undecided', an empty sample included. Failed requests belong to `over`. `UserInputError` on values out of range.
    """
    from scipy.stats import binom

    _check(percentile, confidence)
    if not 0 <= over <= n:
        raise UserInputError(f"over-limit count {over} isn't between 0 and the {n} requests")
    share = 1.0 - percentile
    if binom.cdf(over, n, share) <= 1.0 - confidence:
        return "pass"
    if over > 0 and binom.sf(over - 1, n, share) <= 1.0 - confidence:
        return "fail"
    return "undecided"


@lru_cache(maxsize=256)
def requests_needed(percentile: float, over: int = 0, confidence: float = 0.99) -> int:
    """The fewest requests with which `over` over-limit ones still pass: the sample a percentile needs to be claimed."""
    _check(percentile, confidence)
    if over < 0:
        raise UserInputError(f"over-limit count {over} is negative")
    low, high = over, over + 1  # low never passes: over of over is everything
    while latency_bound(high, over, percentile, confidence) != "pass":
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if latency_bound(middle, over, percentile, confidence) == "pass":
            high = middle
        else:
            low = middle
    return high


def _check(percentile: float, confidence: float) -> None:
    if not 0.0 < percentile < 1.0:
        raise UserInputError(f"percentile {percentile} isn't between 0 and 1")
    if not 0.5 < confidence < 1.0:
        raise UserInputError(f"confidence {confidence} isn't between 0.5 and 1")
