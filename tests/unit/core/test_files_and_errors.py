"""Atomic writes, and exit codes with one sentence."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError, run_main
from pipeline.files import read_json, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_text(tmp_path / "a.json", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_round_trip_and_broken_json(tmp_path: Path) -> None:
    path = write_json(tmp_path / "deep" / "a.json", {"x": [1, None, "é"]})
    assert read_json(path) == json.loads(path.read_text()) == {"x": [1, None, "é"]}
    path.write_text('{"x": 1,\n oops}')
    with pytest.raises(UserInputError, match=r"a\.json, line 2"):
        read_json(path)
    with pytest.raises(UserInputError, match="no such file"):
        read_json(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserInputError("a"), 2),
        (EnvironmentUnfitError("a"), 3),
        (EngineFailedError("a"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert run_main(fail) == code
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "Traceback" not in message


def test_a_defect_leaves_its_trace_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail() -> None:
        raise ZeroDivisionError("boom")

    assert run_main(fail) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert "boom" in (tmp_path / "runs/traceback.log").read_text()


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    """`quantgate plan --json | head -1` must end without a word on stderr."""
    code = (
        "import sys; from pipeline.errors import run_main;"
        "sys.exit(run_main(lambda: [print('x' * 1000) for _ in range(2000)] and None))"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline()
    writer.stdout.close()
    assert writer.stderr is not None
    assert writer.stderr.read() == ""
    assert writer.wait() == 0
