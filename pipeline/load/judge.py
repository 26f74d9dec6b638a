"""Does a load meet its latency limits? Decided request by request, as early as the evidence allows.

The binomial bound of `bounds.py` holds for one look at a sample of fixed size. A probe that looks after every request and stops
at the first favourable count would be wrong more often than it says, so its nominal error is lowered until the chance of
ever crossing the line, over all looks up to the last request, is the one asked for (a boundary of constant nominal level,
after Pocock 1977, computed exactly for the binomial by walking the distribution of the count forward).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.errors import UserInputError
from pipeline.load.bounds import Bound, requests_needed
from pipeline.load.metrics import Limits, tpot_s, ttft_s
from pipeline.load.records import RequestRecord

BISECTIONS = 24


@dataclass(frozen=True)
class Boundary:
    """By sample size n (position 0 unused): pass with at most `pass_at[n]` over the limit, fail with at least `fail_at[n]`."""

    pass_at: tuple[int, ...]
    fail_at: tuple[int, ...]

    @property
    def max_requests(self) -> int:
        return len(self.pass_at) - 1


@lru_cache(maxsize=32)
def boundary(percentile: float, confidence: float, max_requests: int, *, needs_pass: bool = True) -> Boundary:
    """Lines for a probe of at most `max_requests` that judges TTFT and TPOT at once.

    With a true share of over-limit requests of at least 1 - percentile the chance of a pass is at most 1 - confidence; both
    limits must pass, so each may use the whole of it. With a true share of at most that, the chance of a fail is at most
    1 - confidence, of which each of the two limits may use half. `UserInputError` where so few requests can't decide, unless only a
    fail is asked for.
    """
    needed = requests_needed(percentile, 0, confidence)
    if needs_pass and max_requests < needed:
        raise UserInputError(
            f"load.search.max_requests is {max_requests}; p{percentile * 100:g} at {confidence:.0%} confidence can't be judged "
            f"with fewer than {needed}"
        )
    share, error = 1.0 - percentile, 1.0 - confidence
    passing = _calibrate(lambda level: _pass_line(level, share, max_requests), share, error, upper=False)
    failing = _calibrate(lambda level: _fail_line(level, share, max_requests), share, error / 2, upper=True)
    return Boundary(tuple(int(k) for k in passing), tuple(int(k) for k in failing))


def _pass_line(level: float, share: float, max_requests: int) -> np.ndarray:
    """Largest count with P[X <= count] <= level, -1 where none has."""
    from scipy.stats import binom

    sizes = np.arange(1, max_requests + 1)
    at = binom.ppf(level, sizes, share)
    exact = np.where(binom.cdf(at, sizes, share) <= level, at, at - 1)
    return np.concatenate([[-1], exact]).astype(int)


def _fail_line(level: float, share: float, max_requests: int) -> np.ndarray:
    """Smallest count with P[X >= count] <= level."""
    from scipy.stats import binom

    sizes = np.arange(1, max_requests + 1)
    return np.concatenate([[max_requests + 1], binom.isf(level, sizes, share) + 1]).astype(int)


def _calibrate(line: Callable[[float], np.ndarray], share: float, error: float, *, upper: bool) -> np.ndarray:
    """The line of the largest nominal level whose chance of ever being crossed stays within `error`."""
    # A look at each of n sizes at error / n can't err more often than the error, so that level is safe to start from.
    low, high = error / len(line(error)), error
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _crossing(line(middle), share, upper=upper) <= error:
            low = middle
        else:
            high = middle
    return line(low)


def _crossing(line: np.ndarray, share: float, *, upper: bool) -> float:
    """Chance that a count with this share of over-limit requests ever reaches the line."""
    counts = np.zeros(len(line) + 1)
    counts[0] = 1.0
    crossed = 0.0
    for n in range(1, len(line)):
        counts[1:] = counts[1:] * (1 - share) + counts[:-1] * share
        counts[0] *= 1 - share
        outside = slice(line[n], None) if upper else slice(0, line[n] + 1)
        crossed += counts[outside].sum()
        counts[outside] = 0.0
    return float(crossed)


@dataclass(frozen=True)
class Judgement:
    """Where a probe stands: over-limit counts among the first `judged` requests after the warm-up."""

    decision: Bound
    judged: int
    over_ttft: int
    over_tpot: int


class Judge:
    """Takes the requests of one probe as they end, in any order; judges them in the order in which they were sent.

    Which requests have ended by now depends on how long they took, so the ended ones are no fair sample. Therefore those in
    flight count as over the limit for a pass and as within it for a fail: whatever they turn out to be, the decision stands.
    """

    def __init__(self, limits: Limits, line: Boundary, warmup: int) -> None:
        self._limits = limits
        self._line = line
        self._warmup = warmup
        self._ended: dict[int, tuple[bool, bool]] = {}
        """Position -> over the TTFT limit, over the TPOT limit."""
        self._closed = _Count()
        """The first requests, up to the first that is still in flight: their count doesn't change any more."""

    def see(self, record: RequestRecord) -> None:
        """A request ended; one of the warm-up, or one that we stopped, says nothing."""
        if record.index >= self._warmup and record.outcome != "stopped":
            self._ended[record.index - self._warmup] = (
                ttft_s(record) * 1e3 > self._limits.ttft_ms,
                tpot_s(record) * 1e3 > self._limits.tpot_ms,
            )

    def judgement(self) -> Judgement:
        """The first crossing in the order of sending, or how far an undecided probe has come."""
        count, last = self._closed, min(max(self._ended, default=-1) + 1, self._line.max_requests)
        while count.decision is None and count.n < last:
            count = count.then(self._ended.get(count.n), self._line)
            if not count.open_ones:
                self._closed = count
        return Judgement(count.decision or "undecided", count.known, count.over_ttft, count.over_tpot)


@dataclass(frozen=True)
class _Count:
    """Of the first `n` requests: those that ended, those in flight, those over each limit, and the line crossed by then."""

    n: int = 0
    known: int = 0
    open_ones: int = 0
    over_ttft: int = 0
    over_tpot: int = 0
    decision: Bound | None = None

    def then(self, over: tuple[bool, bool] | None, line: Boundary) -> _Count:
        """With one request more; None: it is in flight."""
        n, open_ones = self.n + 1, self.open_ones + (over is None)
        over_ttft, over_tpot = (
            self.over_ttft + bool(over and over[0]),
            self.over_tpot + bool(over and over[1]),
        )
        worst = max(over_ttft, over_tpot)
        decision: Bound | None = None
        if worst >= line.fail_at[n]:
            decision = "fail"
        elif worst + open_ones <= line.pass_at[n]:
            decision = "pass"
        return _Count(n, self.known + (over is not None), open_ones, over_ttft, over_tpot, decision)
