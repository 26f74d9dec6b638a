"""Waiting in tests: until something is so, however slow the machine; a limit only ends a test that would hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 180.0  # for what takes a second or two on a machine that does nothing else
ENGINE_START_S = 1800.0  # for the real engine's start: 45 s on two quiet cores
POLL_S = 0.05


def wait_until(condition: Callable[[], Value], patience_s: float = PATIENCE_S) -> Value:
    """The first true value of `condition`; `AssertionError` with its last one when patience ends."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {patience_s:.0f} s"
        time.sleep(POLL_S)
    return value


def wait_until_empty(left: Callable[[], Sequence[object]], patience_s: float = PATIENCE_S) -> None:
    """Wait until there is nothing left; `AssertionError` with what there is when patience ends."""
    deadline = time.monotonic() + patience_s
    while found := left():
        assert time.monotonic() < deadline, f"still there after {patience_s:.0f} s: {found}"
        time.sleep(POLL_S)
