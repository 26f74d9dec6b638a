"""A stage must not outlive the `dvc` that started it.

When `dvc` is killed with SIGKILL its stage would go on as an orphan, hold the engine's lease and write results that
nobody waits for. So a stage watches its `dvc` and ends itself, with everything it started, when that is gone. SIGTERM
takes the same way out as Ctrl-C: contexts are left, so servers are stopped and temporary files removed.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType


def end_with_dvc() -> None:
    """Turn SIGTERM into KeyboardInterrupt, and send it to ourselves once the `dvc` above us is gone."""
    signal.signal(signal.SIGTERM, _interrupt)
    process = _dvc_above()
    if process is None:
        return
    try:
        descriptor = os.pidfd_open(process)
    except OSError:
        return
    threading.Thread(target=_watch, args=(descriptor,), name="dvc-watch", daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _watch(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def _dvc_above() -> int | None:
    """The nearest ancestor that runs dvc; a shell may stand between."""
    import psutil

    for ancestor in psutil.Process().parents()[:3]:
        try:
            words = ancestor.cmdline()
        except psutil.Error:
            return None
        if any(os.path.basename(word) == "dvc" for word in words[:3]):
            return ancestor.pid
    return None
