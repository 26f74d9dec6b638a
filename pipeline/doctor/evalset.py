"""The team's eval set, as the stage `quality` would read it."""

from __future__ import annotations

from pathlib import Path

from pipeline.doctor.check import Check, ok, warn
from pipeline.doctor.model import why_no_hub
from pipeline.errors import UserInputError
from pipeline.quality.evalset import describe, sample_items
from pipeline.quality.tasks import read_task
from pipeline.settings import Settings


def check_evalset(settings: Settings) -> Check:
    """Whether the set can be read and holds as many items as are asked for."""
    if settings.evalset.folder is None:
        return _from_hub("eval set", "", [settings.evalset.task])
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
    told = "; ".join(said)
    hub = [task.task for task in settings.evalset.further if task.from_hub]
    return _from_hub("eval set", f"{told}; ", hub) if hub else ok("eval set", told)


def _from_hub(name: str, told: str, tasks: list[str]) -> Check:
    """lm-eval's own tasks, whose items are on a hub."""
    found = f"{told}{', '.join(tasks)} of lm-eval's own, read from the hub when scored"
    reason = why_no_hub()
    if reason is None:
        return ok(name, found)
    return warn(
        name,
        f"{found}, and {reason}: scored only where their items are in the hub's cache",
        "score them once where the hub is reachable and take its cache along (HF_HOME), or choose evalset=team-demo-all",
    )
