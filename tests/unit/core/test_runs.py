"""The links that point at a profile's folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.errors import UserInputError
from pipeline.runs import point_at

ROOT = Path(__file__).resolve().parents[3]


def test_results_are_the_profiles(tmp_path: Path) -> None:
    point_at("one", tmp_path)
    (tmp_path / "results/plan.json").write_text("1")
    (tmp_path / "artifacts/weights/awq").mkdir()
    point_at("two", tmp_path)
    assert not (tmp_path / "results/plan.json").exists()
    assert list((tmp_path / "artifacts/weights").iterdir()) == []
    point_at("one", tmp_path)
    assert (tmp_path / "results/plan.json").read_text() == "1"
    assert (tmp_path / "runs/one/weights/awq").is_dir()
    assert not os.path.isabs(os.readlink(tmp_path / "results"))  # a clone that is moved keeps its results


def test_a_folder_in_the_way_is_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/verdict.json").write_text("old")
    with pytest.raises(UserInputError, match="results is in the way"):
        point_at("one", tmp_path)
    assert (tmp_path / "results/verdict.json").read_text() == "old"


def test_showing_what_nobody_made_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "params.yaml").write_text("profile: demo\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["quantgate", "show"])
    assert main() == 2
    assert "demo has no verdict here yet: `dvc repro` makes it" in capsys.readouterr().err
