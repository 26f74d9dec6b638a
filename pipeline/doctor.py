"""`quantgate doctor`: can this machine run a profile, and is the user's own input in order? Nothing is started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.capacity import GIB
from pipeline.environments.build import environment_folder, is_complete
from pipeline.environments.needed import environments_of
from pipeline.errors import EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.files import cache_folder
from pipeline.planning import plan_of
from pipeline.results import Environment
from pipeline.settings import Settings

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do when it isn't ok; `exit_code` is what a failure is worth."""

    name: str
    status: Status
    found: str
    fix: str = ""
    exit_code: int = 0


def examine(settings: Settings, machine: Environment) -> list[Check]:
    """All checks of a profile on this machine, in reading order."""
    checks = [_processor(settings, machine), _memory(settings, machine), _disk(settings)]
    checks += [_environment(name) for name in environments_of(settings)]
    checks.append(_guard("eval set", lambda: _evalset(settings)))
    checks.append(_guard("plan", lambda: _plan(settings)))
    return checks


def _guard(name: str, body: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", body())
    except QuantgateError as error:
        return Check(name, "fail", str(error), exit_code=error.exit_code)


def _processor(settings: Settings, machine: Environment) -> Check:
    if settings.device.kind == "cuda":
        if machine.gpus:
            cards = ", ".join(
                f"{gpu['name']} ({gpu['memory_total_bytes'] / GIB:.1f} GiB)" for gpu in machine.gpus
            )
            return Check("GPU", "ok", cards)
        return Check(
            "GPU", "fail", f"no NVIDIA GPU is visible, and the profile {settings.profile} serves on one",
            "run on a machine with the card and its driver (nvidia-smi must list it), or use profile=demo", 3,
        )  # fmt: skip
    if "avx2" not in machine.cpu_flags:
        return Check(
            "CPU",
            "fail",
            f"{machine.cpu_model} has no AVX2",
            "vLLM's CPU build needs an x86 CPU with AVX2",
            3,
        )
    if "avx512f" in machine.cpu_flags:
        return Check("CPU", "ok", f"{machine.cpu_model}, {machine.cpu_count} cores, AVX-512: stock kernels")
    return Check(
        "CPU",
        "ok",
        f"{machine.cpu_model}, {machine.cpu_count} cores, no AVX-512: int4 and FP8 KV run emulated, labelled so",
    )


def _memory(settings: Settings, machine: Environment) -> Check:
    # The engine's processes and torch take about 3 GiB before any weight (measured on a 2-core CPU with vLLM 0.32.0).
    needed = 4 * GIB if settings.device.kind == "cuda" else 4 * GIB + 2 * settings.device.memory_bytes
    found = f"{machine.memory_bytes / GIB:.1f} GiB of RAM, {needed / GIB:.1f} needed"
    if machine.memory_bytes < needed:
        return Check("memory", "fail", found, "use a machine with more memory", 3)
    return Check("memory", "ok", found)


def _disk(settings: Settings) -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    needed = 2 * GIB
    if settings.model.config is not None:
        needed += 4 * int(next(row["weight_gib"] for row in plan_of(settings)["variants"]) * GIB)
    found = f"{free / GIB:.1f} GiB free here, about {needed / GIB:.1f} for checkpoints and DVC's cache"
    if free < needed:
        return Check("disk", "fail", found, "free some space", 3)
    return Check("disk", "ok", found)


def _environment(name: str) -> Check:
    if is_complete(environment_folder(name)):
        return Check(f"environment {name}", "ok", "built from the current lock")
    return Check(
        f"environment {name}",
        "warn",
        "not built yet",
        f"`python3 -m pipeline.environments {name}` builds it in {cache_folder()}",
    )


def _evalset(settings: Settings) -> str:
    from pipeline.quality.evalset import describe, load_items, sample_items
    from pipeline.quality.tasks import read_task, refuse_leaks

    if settings.evalset.folder is None:
        return f"{settings.evalset.task} of lm-eval's own, read from a hub when it is scored"
    said = []
    for task in (settings.evalset, *settings.evalset.further):
        files = read_task(Path(settings.evalset.folder), task.task)
        items = load_items(files.items_path, files.kind)
        if task.items is not None and task.items > len(items):
            raise UserInputError(
                f"conf/evalset/{settings.choices['evalset']}.yaml: items is {task.items}; "
                f"{files.items_path} has {len(items)}"
            )
        sample_items(items, task.items, settings.evalset.seed, task.slice_items)
        slices = ", ".join(f"{name} {count}" for name, count in describe(items)["slices"].items())
        said.append(f"{len(items)} items ({slices})")
    refuse_leaks(settings)
    return f"{'; '.join(said)}, none of them in the calibration text"


def _plan(settings: Settings) -> str:
    if settings.model.config is None:
        return "the model's geometry is read once its weights are at hand"
    rows = plan_of(settings)["variants"]
    return (
        ", ".join(f"{row['variant']} {row['sequences']}" for row in rows)
        + f" of {settings.policy.required_sequences} sequences"
    )


def verdict(checks: list[Check]) -> QuantgateError | None:
    """The error to end with, or None when the profile can run."""
    failed = [check for check in checks if check.status == "fail"]
    if not failed:
        return None
    first = failed[0]
    text = f"{first.name}: {first.found}" + (f"; {first.fix}" if first.fix else "")
    return UserInputError(text) if first.exit_code == 2 else EnvironmentUnfitError(text)
