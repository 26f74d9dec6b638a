"""One engine at a time per card and user; on a CPU, per machine.

Two engines that start at once corrupt each other's memory profile (vLLM issue 55827), and on a CPU they measure each other.
The lease is an `flock`: the kernel drops it when the last process that holds the open file is gone, so no ending can leave
it behind. The guard process inherits the descriptor, so the lease outlives a killed parent until its engine is gone too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.errors import EnvironmentUnfitError


def default_lease_folder() -> Path:
    """`$XDG_RUNTIME_DIR/quantgate-<uid>`, or a folder of the user's own under the temporary folder.

    Not in the home folder: a test or a CI job with a HOME of its own still shares the machine.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"quantgate-{os.getuid()}"


@contextlib.contextmanager
def engine_leases(
    uuids: Sequence[str], folder: Path | None = None, timeout_s: float = 3600.0
) -> Iterator[tuple[int, ...]]:
    """Hold the leases of these cards, of the machine where there are none; yields their file descriptors.

    In one order for everybody, so that two engines on the same two cards can't wait for each other.
    """
    folder = default_lease_folder() if folder is None else folder
    names = [f"engine-{uuid}.lock" for uuid in sorted(uuids)] or ["engine.lock"]
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(engine_lease(folder / name, timeout_s)) for name in names)


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def engine_lease(
    path: Path, timeout_s: float = 3600.0, notify: Callable[[str], None] = _to_stderr
) -> Iterator[int]:
    """Hold one lease; yields its file descriptor (give it to the guard). Waits with a message a minute.

    `EnvironmentUnfitError` after `timeout_s`, naming the holder.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait(descriptor, path, timeout_s, notify)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid()}).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)  # not LOCK_UN: the guard may still hold the same open file


def _wait(descriptor: int, path: Path, timeout_s: float, notify: Callable[[str], None]) -> None:
    deadline = time.monotonic() + timeout_s
    next_message = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            if now >= deadline:
                raise EnvironmentUnfitError(
                    f"another engine{_holder(descriptor)} still holds {path} after {timeout_s:.0f} s; two engines at once "
                    "would falsify each other's numbers, so end that one or wait for it"
                ) from None
            if now >= next_message:
                notify(f"waiting for another engine{_where(path)}{_holder(descriptor)} to end")
                next_message = now + 60.0
            time.sleep(min(0.2, timeout_s))


def _where(path: Path) -> str:
    uuid = path.stem.removeprefix("engine").removeprefix("-")
    return f" on the card {uuid}" if uuid else " on this machine"


def _holder(descriptor: int) -> str:
    try:
        return f" (pid {json.loads(os.pread(descriptor, 200, 0))['pid']})"
    except (ValueError, KeyError, TypeError):
        return ""
