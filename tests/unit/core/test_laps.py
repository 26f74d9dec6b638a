"""Phases of a stage, on a clock that the test moves."""

from __future__ import annotations

from pipeline.laps import Laps


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_phases_leave_nothing_out_and_dont_overlap() -> None:
    clock = Clock()
    laps = Laps(clock)
    for phase, seconds in (("engine start", 14.0), ("levels", 3.0), ("search", 5.0), ("levels", 2.5)):
        clock.now += seconds
        laps.end(phase)
    assert [(phase.name, phase.seconds) for phase in laps.phases()] == [
        ("engine start", 14.0), ("levels", 5.5), ("search", 5.0),
    ]  # fmt: skip
    clock.now += 60.0  # of nobody's phase: nothing that ended after the record was made
    assert laps.wall_s == 24.5


def test_a_phase_that_failed_is_in_none() -> None:
    clock = Clock()
    laps = Laps(clock)
    try:
        clock.now += 9.0
        raise OSError
    except OSError:
        pass
    assert laps.phases() == [] and laps.wall_s == 0.0
