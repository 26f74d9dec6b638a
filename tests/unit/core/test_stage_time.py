"""What a stage leaves of its time: its own where it ended well, nothing where it didn't."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import UserInputError
from pipeline.results import StageTime, load
from pipeline.stages import context

TIME = "results/time/measure@awq.v2.json"


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's start without a profile and without dvc above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline/stages/measure.py", "demo", "awq.v2"])
    monkeypatch.setattr(context, "end_with_dvc", lambda: None)
    monkeypatch.setattr(context, "load_settings", lambda _: SimpleNamespace(profile="demo"))
    monkeypatch.setattr(context, "check_graph", lambda _: None)


def fail(*_: object) -> None:
    raise UserInputError("wrong")


def test_a_stage_that_ended_well_leaves_its_time() -> None:
    assert context.stage_main(lambda *_: None, "variant") == 0
    found = load(TIME, StageTime)
    assert found.stage == "measure@awq.v2" and found.wall_s > 0


def test_a_stage_that_failed_leaves_neither_its_own_nor_an_earlier_time() -> None:
    context.stage_main(lambda *_: None, "variant")
    assert context.stage_main(fail, "variant") == 2
    assert not Path(TIME).exists()
