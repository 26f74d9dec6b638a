"""The fingerprint changes with the results and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.tracking import lock_fingerprint

LOCK = "schema: '2.0'\nstages:\n  verdict:\n    outs:\n    - {path: runs/demo/verdict.json, md5: %s}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dvc.lock"
    path.write_text(text, encoding="utf-8")
    return path


def test_another_result_changes_it_and_nothing_else(tmp_path: Path) -> None:
    before = lock_fingerprint(write(tmp_path, LOCK % "aa"))
    assert lock_fingerprint(write(tmp_path, f"# again\n{LOCK % 'aa'}")) == before
    assert lock_fingerprint(write(tmp_path, LOCK % "ab")) != before


@pytest.mark.parametrize("text", ["[1, 2]", "stages: 3", "{"])
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserInputError, match=r"dvc\.lock"):
        lock_fingerprint(write(tmp_path, text))


def test_a_missing_lock_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="dvc repro"):
        lock_fingerprint(tmp_path / "dvc.lock")
