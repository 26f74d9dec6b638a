"""Run one module of ours in another environment: JSON request in, JSON result out, nothing left behind.

The environments exclude each other's pins, so work that needs torch is a subprocess. Both ends live here:
`run_module` for the caller, `child_main` for the module that is run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.files import read_json, write_json

_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_CAUSE_CHARACTERS = 400
_ERRORS = {
    error.__name__: error
    for error in (UserInputError, EnvironmentUnfitError, EngineFailedError, QuantgateError)
}


class Progress:
    """Written by the child, read by the parent: which phase, how many steps are done, how many there are."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._path is not None:
            write_json(self._path, {"phase": phase, "done": done, "total": total})


def child_main(work: Callable[[dict[str, Any]], dict[str, Any]], argv: list[str]) -> int:
    """Entry point of a module that runs as `python -m MODULE request.json result.json`.

    A `QuantgateError` becomes a result with its sentence; anything else is a defect, whose trace goes to the
    log (stderr) for the parent to find. The process dies with its parent, whichever way the parent dies.
    """
    _die_with_parent()
    request_path, result_path = argv[1:3]
    try:
        write_json(result_path, {"value": work(read_json(request_path))})
    except QuantgateError as error:
        write_json(result_path, {"error": {"type": type(error).__name__, "message": str(error)}})
        return error.exit_code
    return 0


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone; a killed parent can't clean up after itself."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get("QUANTGATE_PARENT_PID", str(os.getppid())):
        os._exit(1)  # the parent died before the request above


def run_module(
    python: str | Path,
    module: str,
    request: Mapping[str, Any],
    log_path: str | Path,
    *,
    environment: Mapping[str, str] | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Run `module` with the interpreter `python` and return the JSON object that it wrote.

    stdout and stderr go to `log_path` (appended). With `show_progress`, the request gets a `progress_file`
    and a bar with the time left appears on stderr. `environment` is added to a copy of ours.
    Raises what the module raised, by name, or `EngineFailedError` with the cause found in the log.
    """
    if not Path(python).exists():
        raise EnvironmentUnfitError(
            f"{python}: no such interpreter; build the environments first (make environments)"
        )
    log_path = Path(log_path)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quantgate-") as scratch, log_path.open("ab") as log:
        request_path, result_path = Path(scratch) / "request.json", Path(scratch) / "result.json"
        progress_path = Path(scratch) / "progress.json" if show_progress else None
        write_json(
            request_path, {**request, **({"progress_file": str(progress_path)} if progress_path else {})}
        )
        log_start = log.tell()
        process = subprocess.Popen(
            [str(python), "-m", module, str(request_path), str(result_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(environment or {}),
        )
        try:
            _wait(process, progress_path)
        finally:
            _kill_group(process)
        if result_path.is_file():
            answer = read_json(result_path)
            if "error" in answer:
                raise _ERRORS[answer["error"]["type"]](answer["error"]["message"])
            if process.returncode == 0:
                value: dict[str, Any] = answer["value"]
                return value
        cause = _cause(log_path, log_start, process.returncode)
        raise EngineFailedError(f"{module} failed: {cause} (log: {log_path})")


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
    # As for the engine: a spinning thread keeps the core from the one it waits for, should anything else run beside us.
    inherited.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return {
        **inherited,
        "PYTHONPATH": str(_ROOT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # models are local by now; a look at the hub would only slow or fail the start
        "TOKENIZERS_PARALLELISM": "false",
        "QUANTGATE_PARENT_PID": str(os.getpid()),
        **extra,
    }


def _wait(process: subprocess.Popen[bytes], progress_path: Path | None) -> None:
    if progress_path is None:
        process.wait()
        return
    from tqdm import tqdm

    bar: tqdm[Any] | None = None
    phase = None
    # A log file gets a line now and then, a terminal gets a live bar.
    interval_s = 0.5 if sys.stderr.isatty() else 15.0
    running = True
    while running:
        time.sleep(0.3)
        running = (
            process.poll() is None
        )  # before the last look, so that a child of a moment shows its progress too
        if not progress_path.is_file():
            continue
        state = read_json(progress_path)
        if bar is None or phase != state["phase"]:
            if bar is not None:
                bar.close()
            phase = state["phase"]
            bar = tqdm(total=state["total"], desc=phase, file=sys.stderr, mininterval=interval_s, leave=True)
        bar.update(state["done"] - bar.n)
    if bar is not None:
        if process.returncode == 0:
            bar.update(bar.total - bar.n)
        bar.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the child's process group, the child itself included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(log_path: Path, start: int, return_code: int) -> str:
    """The sentence that explains a failure: the last exception in the log, else the signal that ended it."""
    with log_path.open("rb") as log:
        log.seek(start)
        lines = log.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    if return_code == -signal.SIGKILL:
        return "it was killed, most often because the machine ran out of memory"
    text = [line for line in lines if line.strip()]
    headers = [
        number for number, line in enumerate(text) if line.startswith("Traceback (most recent call last):")
    ]
    if headers:
        # After the frames, which are indented, come the exception's own lines.
        after = text[headers[-1] + 1 :]
        own = next((number for number, line in enumerate(after) if not line[0].isspace()), len(after))
        message = " ".join(" ".join(after[own:]).split())
        return message if len(message) <= MAX_CAUSE_CHARACTERS else message[:MAX_CAUSE_CHARACTERS] + "..."
    return text[-1].strip() if text else f"it ended with exit code {return_code} and wrote nothing"
