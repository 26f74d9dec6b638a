"""Whether processes still run, asked while they may be vanishing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def is_running(pid: int) -> bool:
    """Whether there is a process of that number; see `alive`."""
    try:
        return bool(alive([psutil.Process(pid)]))
    except psutil.NoSuchProcess:
        return False


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie doesn't: it stays until whoever adopted it collects it, which in a container may be nobody."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
