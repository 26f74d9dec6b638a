"""The fingerprint changes with the results and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.tracking import lock_fingerprint

LOCK = "schema: '2.0'\nstages:\n  verdict@demo:\n    outs:\n    - {path: runs/demo/verdict.json, md5: %s}\n%s"
OTHER = "  verdict@demo-full:\n    outs:\n    - {path: runs/demo-full/verdict.json, md5: %s}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dvc.lock"
    path.write_text(text, encoding="utf-8")
    return path


def test_another_profile_does_not_change_it(tmp_path: Path) -> None:
    before = lock_fingerprint("demo", write(tmp_path, LOCK % ("aa", "")))
    assert lock_fingerprint("demo", write(tmp_path, LOCK % ("aa", OTHER % "bb"))) == before
    assert lock_fingerprint("demo", write(tmp_path, LOCK % ("aa", OTHER % "cc"))) == before
    assert lock_fingerprint("demo-full", write(tmp_path, LOCK % ("aa", OTHER % "cc"))) != before


def test_a_profile_that_never_ran_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no stage of the profile rtx4090"):
        lock_fingerprint("rtx4090", write(tmp_path, LOCK % ("aa", "")))


def test_another_result_changes_it(tmp_path: Path) -> None:
    assert lock_fingerprint("demo", write(tmp_path, LOCK % ("aa", ""))) != lock_fingerprint(
        "demo", write(tmp_path, LOCK % ("ab", ""))
    )


@pytest.mark.parametrize("text", ["[1, 2]", "stages: 3", "{"])
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserInputError, match=r"dvc\.lock"):
        lock_fingerprint("demo", write(tmp_path, text))


def test_a_missing_lock_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="dvc repro"):
        lock_fingerprint("demo", tmp_path / "dvc.lock")
