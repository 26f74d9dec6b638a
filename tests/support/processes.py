"""Whether a process that isn't ours still runs."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """A zombie doesn't: it stays until whoever adopted it collects it, which in a container may be nobody."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
