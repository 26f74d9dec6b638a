"""The engine's parent process: it stays behind when we are killed, and leaves nothing of the engine behind.

`server` starts it in a session of its own and talks to it through two pipes: commands in, one JSON event a line out. The
end of the command pipe means that whoever started it is gone, by whatever signal, and ends the engine. It is the "child
subreaper" of everything below it, so even a worker that left the process group or lost its own parent stays its descendant
and is found.

Run as `python -m pipeline.serving.guard`; the first line of its input is a JSON object `{"command": [...], "environment":
{...}, "log": path}`. Events: `{"event": "started", "pid": n}`, `{"event": "exited", "returncode": n}`,
`{"event": "failed", "why": text}`, `{"event": "gone", "left": n}`. Commands: `stop SECONDS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
ORPHANED_GRACE_S = 5.0
KILL_WAIT_S = 10.0
SOCKET_PATH_BYTES = 107  # unix(7): sun_path without its final zero
SOCKET_NAME_BYTES = 36  # a UUID: get_open_zmq_ipc_path, vllm/utils/network_utils.py of 0.32.0


def main() -> int:
    """Start the engine, wait for a command or for the end of the pipe, and clean up."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone says when to stop
    request = json.loads(sys.stdin.buffer.readline())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    folder = engine_folder()
    try:
        try:
            pid = _start(request, folder)
        except OSError as error:
            _tell({"event": "failed", "why": f"{error.strerror}: {error.filename or request['command'][0]}"})
            return 1
        _tell({"event": "started", "pid": pid})
        grace_s = _watch(pid)
        left = _end(pid, grace_s)
        _tell({"event": "gone", "left": left})
        return 0 if left == 0 else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def engine_folder() -> str:
    """A new folder for the engine's temporary files, short enough for its sockets: in /tmp where TMPDIR is too long a path."""
    folder = tempfile.mkdtemp(prefix="quantgate-engine-")
    if len(os.fsencode(folder)) + len("/") + SOCKET_NAME_BYTES > SOCKET_PATH_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="quantgate-engine-", dir="/tmp")
    return folder


def _start(request: dict[str, Any], folder: str) -> int:
    """Start the engine as the leader of a session of its own. Its temporary files go into `folder`."""
    default = {signal.SIGINT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}

    def prepare() -> None:
        for number, action in default.items():
            signal.signal(number, action)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if this process is killed too, the API server goes with it

    with open(request["log"], "ab") as log:
        child = subprocess.Popen(
            request["command"],
            env={**request["environment"], "TMPDIR": folder},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
        )
    child.returncode = 0  # reaped below, with the orphans; keeps Popen from waiting on its own
    return child.pid


def _watch(pid: int) -> float:
    """Return the seconds of grace to end with, once told to stop or left alone."""
    buffer = b""
    while True:
        for reaped, returncode in _reap():
            if reaped == pid:
                _tell({"event": "exited", "returncode": returncode})
        if not select.select([sys.stdin.buffer], [], [], 0.1)[0]:
            continue
        chunk = os.read(sys.stdin.fileno(), 4096)
        if not chunk:
            return ORPHANED_GRACE_S
        buffer += chunk
        if b"\n" in buffer:
            return float(buffer.split(b"\n")[0].split()[1])


def _end(pid: int, grace_s: float) -> int:
    """End the engine and every descendant within about `grace_s` + 10 s; returns how many survived.

    First SIGTERM to the API server alone, which then closes its engine in order; then SIGTERM to all; then SIGKILL. Python's
    resource trackers are killed last: they remove the shared memory of a killed worker once their pipe closes.
    """
    leader = [process for process in _descendants() if process.pid == pid]
    for process in leader:
        _signal(process, signal.SIGTERM)
    _wait_while(lambda: any(process.pid == pid for process in _descendants()), grace_s / 2)
    for process in _descendants():
        _signal(process, signal.SIGTERM)
    _wait_while(_descendants, grace_s / 2)
    deadline = time.monotonic() + KILL_WAIT_S
    tracker_deadline = time.monotonic() + 2.0
    while (alive := _descendants()) and time.monotonic() < deadline:
        workers = [process for process in alive if not _is_tracker(process)]
        for process in workers or (alive if time.monotonic() > tracker_deadline else []):
            _signal(process, signal.SIGKILL)
        _wait_while(_descendants, 0.1)
    return len(_descendants())


def _wait_while(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal(process: psutil.Process, number: int) -> None:
    """By process, not by group id: psutil refuses a pid that was given to someone else in the meantime."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _descendants() -> list[psutil.Process]:
    """All live processes below this one. Finished ones are reaped on the way."""
    _reap()
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return alive


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _reap() -> list[tuple[int, int]]:
    """Collect finished children, adopted ones included, as (pid, return code; negative: the signal)."""
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if pid == 0:
            return reaped
        reaped.append((pid, os.waitstatus_to_exitcode(status)))


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _tell(event: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody may be left to tell
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
