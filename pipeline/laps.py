"""Where a stage's time goes: the clock is read at the end of each phase, so phases can't overlap and leave nothing out.

laps = Laps()
with serve(...) as server:
    laps.end("engine start")
    ...
    laps.end("fill")
laps.end("shutdown")
Measurement(..., phases=laps.phases(), wall_s=laps.wall_s)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.results.time import Phase


class Laps:
    """Seconds by phase since it was made, on a clock that nobody sets back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._ended = clock()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """All since the last phase ended was this one; one that comes back goes on where it stopped."""
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._ended
        self._ended = now

    @property
    def wall_s(self) -> float:
        """From the beginning to the end of the last phase: the sum of all."""
        return self._ended - self._started

    def phases(self) -> list[Phase]:
        """In the order in which they first ended."""
        return [Phase(name=name, seconds=round(seconds, 2)) for name, seconds in self._seconds.items()]


def process_age_s() -> float:
    """Seconds since this process began, whatever programs it has been since; to a hundredth, where psutil's is to a second (it adds
    the time of the boot, which is whole)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, ticks since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
