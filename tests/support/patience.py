"""Waiting in tests: until something is so, however slow the machine; a limit only ends a test that would hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PATIENCE_S = 180.0  # for what takes a second or two on a machine that does nothing else
POLL_S = 0.05


def wait_until(condition: Callable[[], Value], patience_s: float = PATIENCE_S) -> Value:
    """The first true value of `condition`; `AssertionError` with its last one when patience ends."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {patience_s:.0f} s"
        time.sleep(POLL_S)
    return value
