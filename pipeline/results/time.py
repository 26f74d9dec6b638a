"""Where the time went: the phases of a stage, and when each stage ran."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from pipeline.results.record import Record


class Phase(Record):
    """One part of a stage's time. A stage's phases don't overlap."""

    name: str
    seconds: float


class StageTime(Record):
    """`results/time/<stage>.json`: one run of one stage. No stage reads it, so that a run that only took longer is no change."""

    stage: str = Field(description="as in `dvc repro`, with its item: measure@awq")
    started_at: datetime = Field(description="UTC; when its process began")
    wall_s: float = Field(description="from there to the end of the stage, all imports included")
