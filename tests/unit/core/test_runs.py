"""The links that point at a profile's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.runs import point_at


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
