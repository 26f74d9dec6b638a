"""Is a scored engine still working? Asked while answers are awaited, in place of a limit on how long one may take.

Under serving conditions a request waits behind others, in the engine's queue, for as long as their answers take: on a slow card
an answer of 2,048 tokens behind a full batch takes many minutes and is in order. What isn't in order is an engine that makes no
token at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.errors import EngineFailedError

CHECK_INTERVAL_S = 5.0
STALL_TIMEOUT_S = 300.0


class StallGuard:
    """Raises `EngineFailedError` once the engine has neither answered nor counted a token for `timeout_s` seconds.

    `progress` gives the engine's counters, or anything that changes while it works; it raises with the cause of a dead one.
    """

    def __init__(self, progress: Callable[[], object], timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self.interval_s = min(CHECK_INTERVAL_S, timeout_s)
        """How often to ask, in seconds."""
        self._sign: object = None
        self._moved = self._checked = time.monotonic()

    def answered(self) -> None:
        """An answer came."""
        self._moved = time.monotonic()

    def check(self) -> None:
        """Cheap: the engine is asked once in `interval_s`, however many requests wait."""
        now = time.monotonic()
        if now - self._checked < self.interval_s:
            return
        self._checked = now
        sign = self._progress()
        if sign != self._sign:
            self._sign, self._moved = sign, now
        if now - self._moved >= self._timeout_s:
            raise EngineFailedError(
                f"the engine made no token for {self._timeout_s:.0f} s while answers were awaited"
            )
