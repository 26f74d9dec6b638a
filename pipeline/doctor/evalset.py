"""The team's eval set, as the stage `quality` would read it."""

from __future__ import annotations

from pathlib import Path

from pipeline.doctor.check import Check, ok
from pipeline.errors import UserInputError
from pipeline.quality.evalset import describe, sample_items
from pipeline.quality.tasks import read_task, refuse_leaks
from pipeline.settings import Settings


def check_evalset(settings: Settings) -> Check:
    """Whether the set can be read, holds as many items as are asked for, and keeps clear of the calibration text."""
    if settings.evalset.folder is None:
        return ok("eval set", f"{settings.evalset.task} of lm-eval's own, read from a hub when it is scored")
    said = []
    for task in settings.evalset.own_tasks:
        files = read_task(Path(settings.evalset.folder), task.task)
        items = files.items
        if task.items is not None and task.items > len(items):
            raise UserInputError(
                f"conf/evalset/{settings.choices['evalset']}.yaml: items is {task.items}; "
                f"{files.items_path} has {len(items)}"
            )
        sample_items(items, task.items, settings.evalset.seed, task.slice_items)
        slices = ", ".join(f"{name} {count}" for name, count in describe(items)["slices"].items())
        said.append(f"{len(items)} items ({slices})")
    refuse_leaks(settings)
    told = f"{'; '.join(said)}, none of them in the calibration text"
    hub = [task.task for task in settings.evalset.further if task.from_hub]
    return ok(
        "eval set", f"{told}; {', '.join(hub)} of lm-eval's own, read from a hub when scored" if hub else told
    )
