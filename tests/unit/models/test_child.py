"""A subprocess ends in a value or in one sentence, and is never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError
from pipeline.models.child import run_module
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.processes import is_running

CHILD = "tests.support.child_module"


def test_value_comes_back_and_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    assert run_module(sys.executable, CHILD, {"do": "echo", "value": 7}, log) == {"value": 7}
    assert "said by the child" in log.read_text()


def test_error_of_the_child_arrives_as_itself(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"^wrong by the user$"):
        run_module(sys.executable, CHILD, {"do": "refuse"}, tmp_path / "child.log")


def test_crash_names_the_exception_and_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"failed: ValueError: something broke \(log: .*child\.log\)"):
        run_module(sys.executable, CHILD, {"do": "crash"}, tmp_path / "child.log")


def test_earlier_runs_in_the_log_are_not_blamed(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("Traceback (most recent call last):\nKeyError: 'of yesterday'\n")
    with pytest.raises(EngineFailedError, match="something broke"):
        run_module(sys.executable, CHILD, {"do": "crash"}, log)


def test_kill_is_explained(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="ran out of memory"):
        run_module(sys.executable, CHILD, {"do": "die"}, tmp_path / "child.log")


def test_missing_interpreter_is_an_unfit_environment(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="no such interpreter"):
        run_module(tmp_path / "python", CHILD, {}, tmp_path / "child.log")


def test_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_module(sys.executable, CHILD, {"do": "progress"}, tmp_path / "child.log", show_progress=True)
    assert "counting" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_child_ends_with_its_parent(tmp_path: Path, sign: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    code = (
        # A run in the background starts with SIGINT ignored, and whoever starts us may be one.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from pipeline.models.child import run_module; "
        f"run_module(sys.executable, {CHILD!r}, {{'do': 'sleep', 'pid_file': {str(pid_file)!r}}}, {str(tmp_path / 'log')!r})"
    )
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.DEVNULL)
    try:
        child_pid = int(wait_until(lambda: pid_file.read_text() if pid_file.exists() else ""))
        parent.send_signal(sign)
        parent.wait(PATIENCE_S)
        wait_until(lambda: not is_running(child_pid))
    finally:
        parent.kill()
