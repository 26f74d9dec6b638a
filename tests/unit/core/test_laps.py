"""Phases of a stage, on a clock that the test moves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from pipeline.laps import Laps

ROOT = Path(__file__).resolve().parents[3]


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


TICK_S = 0.01
AGE = """
import time
began = time.monotonic()
from pipeline.laps import process_age_s
time.sleep(0.2)
print(time.monotonic() - began, process_age_s())
"""


def test_a_processs_age_is_between_what_it_saw_itself_and_what_its_parent_waited() -> None:
    """Ten in a row: a clock that is off by part of a second is off the same way each time."""
    began = time.monotonic()
    found = [
        tuple(map(float, subprocess.check_output([sys.executable, "-c", AGE], cwd=ROOT, text=True).split()))
        for _ in range(10)
    ]
    waited = time.monotonic() - began
    assert all(seen <= age + TICK_S for seen, age in found)
    assert sum(age for _, age in found) <= waited + 10 * TICK_S
