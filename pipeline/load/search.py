"""The largest load at which the SLO holds: doubling until it doesn't, then bisection. Pure; a probe is a function.

Loads are concurrencies (whole numbers) or rates (requests a second). Each probe says pass, fail or undecided, and latency is
taken to grow with load. The answer is an interval: `low` is the largest load that passed, `high` the largest that hasn't been shown
to fail at the search's resolution. Where every probe was decided the two are one load; an undecided probe stays between them and
is never rounded up.

What was seen before the search only says where to look first: passes and fails are those of probes alone, so an expectation
that is wrong costs probes and changes no answer's meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.load.bounds import Bound

ProbeAt = Callable[[float], Bound]
LIMIT_NOT_FOUND = "the limit is above the highest load tried"


@dataclass(frozen=True)
class Axis:
    """The loads a search may try."""

    start: float
    minimum: float
    maximum: float
    whole: bool
    """Whole numbers, one apart at the finest; else geometric steps."""
    resolution: float
    """Relative step between two loads that need not be told apart; whole numbers are told apart by at least 1."""

    def between(self, low: float, high: float) -> float | None:
        """A load to try between two others, None when they are neighbours at this resolution. `low` 0: below the minimum."""
        if self.whole:
            apart = max(1, math.floor(low * self.resolution))
            return float((low + high) // 2) if high - low > apart else None
        low = low or self.minimum / (1 + self.resolution)
        return math.sqrt(low * high) if high / low > (1 + self.resolution) * (1 + 1e-9) else None

    def points(self) -> list[float]:
        """Every load of a full grid of the same resolution."""
        found = [self.minimum]
        while True:
            step = max(1, math.floor(found[-1] * self.resolution))
            following = found[-1] + step if self.whole else found[-1] * (1 + self.resolution)
            if following > self.maximum * (1 + 1e-9):
                return found
            found.append(following)

    def below(self, load: float) -> float:
        """The next lower load at this resolution: what hasn't failed where `load` did."""
        if self.whole:
            return load - 1
        return load / (1 + self.resolution)


@dataclass(frozen=True)
class Expected:
    """The largest load that seemed to meet the limits and the smallest above it that seemed to break them, in what was run
    before. Not judged: only where to look."""

    holds: float | None = None
    breaks: float | None = None


NOTHING = Expected()


@dataclass(frozen=True)
class Found:
    """`low` None: no load tried passed. `high` None: none failed, the limit is above the highest tried."""

    low: float | None
    high: float | None
    stopped: bool
    """The search ended by its budget, so the interval is wider than its resolution."""


def search(
    axis: Axis,
    probe: ProbeAt,
    may_go_on: Callable[[], bool] = lambda: True,
    expected: Expected = NOTHING,
) -> Found:
    """Find the largest passing load of `axis`. `may_go_on` is asked before every probe after the first."""
    run = _Run(axis, probe, may_go_on, expected)
    run.climb()
    run.close_in()
    run.pin_upper_end()
    low = run.low or None
    return Found(low, None if run.fail is None else axis.below(run.fail), run.stopped)


class _Run:
    """`low`: largest pass, 0 when none. `ceiling`: smallest load above it that didn't pass. `fail`: smallest that failed."""

    def __init__(self, axis: Axis, probe: ProbeAt, may_go_on: Callable[[], bool], expected: Expected) -> None:
        self.axis = axis
        self.expected = expected
        self.low = 0.0
        self.ceiling: float | None = None
        self.fail: float | None = None
        self.stopped = False
        self._probe = probe
        self._may_go_on = may_go_on
        self._decided: dict[float, Bound] = {}

    def _try(self, load: float | None) -> bool:
        """Probe, and take the answer in; False when there is nothing to try or no budget left."""
        if load is None or self.stopped:
            return False
        if load in self._decided:
            return True  # its answer has been taken in
        if self._decided and not self._may_go_on():
            self.stopped = True
            return False
        decision = self._decided[load] = self._probe(load)
        if decision == "pass":
            self.low = max(self.low, load)
            if self.ceiling is not None and self.ceiling <= self.low:
                self.ceiling = self.fail  # an undecided load below one that passed needs no answer any more
        else:
            self.ceiling = load if self.ceiling is None else min(self.ceiling, load)
            if decision == "fail":
                self.fail = load if self.fail is None else min(self.fail, load)
        return True

    def climb(self) -> None:
        """Up from the first load while it passes; down while nothing has passed."""
        load = self._first()
        while self._try(load) and self.ceiling is None and load < self.axis.maximum:
            load = self._higher(load)
        while not self.low and self.ceiling is not None and self.ceiling > self.axis.minimum:
            if not self._try(self._lower(self.ceiling)):
                return

    def _first(self) -> float:
        """The middle of what is expected; half of what is expected to fail; the axis' start, or double what is expected to pass."""
        holds, breaks = self.expected.holds, self.expected.breaks
        if holds is None:
            return self.axis.start if breaks is None else self._lower(breaks)
        if holds >= self.axis.maximum:
            return holds
        return self._higher(holds) if breaks is not None else max(self._higher(holds), self.axis.start)

    def _higher(self, passed: float) -> float:
        """A load above: half of the way to the one that is expected to fail, else double."""
        breaks = self.expected.breaks
        if breaks is None or breaks <= passed:
            return min(2 * passed, self.axis.maximum)
        middle = self.axis.between(passed, breaks)
        return breaks if middle is None else middle

    def _lower(self, ceiling: float) -> float:
        """A load below: half of the way to the one that is expected to pass, else half."""
        holds = self.expected.holds
        if holds is None or holds >= ceiling:
            half = max(ceiling / 2, self.axis.minimum)
            return float(math.floor(half)) if self.axis.whole else half
        middle = self.axis.between(holds, ceiling)
        return holds if middle is None else middle

    def close_in(self) -> None:
        """Bisect between the largest pass and the smallest load that didn't."""
        while self.low and self.ceiling is not None and self._try(self.axis.between(self.low, self.ceiling)):
            pass

    def pin_upper_end(self) -> None:
        """With an undecided load above the largest pass: find the smallest load that fails, to say how far it may reach."""
        undecided = self.ceiling
        while undecided is not None and undecided != self.fail:
            if self.fail is None:
                if undecided >= self.axis.maximum:
                    return
                load: float | None = self._higher(undecided)
            else:
                load = self.axis.between(undecided, self.fail)
            before = self.fail
            if load is None or not self._try(load):
                return
            if self.fail == before:
                undecided = load
