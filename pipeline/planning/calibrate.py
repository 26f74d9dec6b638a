"""`quantgate calibrate`: the overheads that our own runs really had, as a new option in conf/overheads/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.capacity import GIB
from pipeline.errors import UserInputError
from pipeline.files import read_json, write_text
from pipeline.planning.scenario import card_of, rules_of
from pipeline.results import Measurement, MemoryRun, load
from pipeline.settings import Settings
from pipeline.settings.schema import OverheadConfiguration, OverheadSettings

CARD_TOLERANCE_BYTES = GIB // 10
"""Drivers differ in what they reserve of one card; less than the narrowest overhead band (conf/overheads/rtx4090.yaml)."""
TERMS = ("buffers", "activation", "non_torch", "cuda_graphs")


def calibrate(settings: Settings, files: Sequence[Path], root: Path | None = None) -> tuple[Path, str]:
    """Fit every term that the runs' logs name; the others stay computed, or as the table has them. Returns the file and a summary.

    A fitted term is the mean over the runs, its band their lowest and highest, and what the server was told stands beside it: with
    another configuration it is scaled as the model of its term is. Raises `UserInputError` where no run names a
    term (an emulated budget never does), or where runs are of another profile or engine version.
    """
    version = settings.server.engine_version
    runs = [_read(path) for path in files]
    if not runs:
        raise UserInputError(
            f"no measured run of {settings.profile} to calibrate from; `dvc repro` measures one, `make gpu-test` on a card starts "
            "its engine with random weights; or name their JSON files"
        )
    for path, run in zip(files, runs, strict=True):
        if run.profile != settings.profile:
            raise UserInputError(
                f"{path}: measured with the profile {run.profile!r}, not {settings.profile!r}"
            )
        if run.provenance.engine_version != version:
            raise UserInputError(
                f"{path}: measured with engine version {run.provenance.engine_version}, the profile's is {version}"
            )
        for memory in run.provenance.gpu_memory or []:
            if abs(memory.visible_bytes - settings.device.memory_bytes) > CARD_TOLERANCE_BYTES:
                raise UserInputError(
                    f"{path}: measured on {memory.name} with {memory.visible_bytes / GIB:.2f} GiB visible, "
                    f"not on {settings.device.name} with {settings.device.memory_gib}"
                )
    seen = {name: [value for run in runs if (value := _reported(run, name)) is not None] for name in TERMS}
    if not any(seen.values()):
        raise UserInputError(
            f"none of {len(runs)} runs logged a memory term"
            + (": the device is an emulated budget, which has none" if settings.device.emulated else "")
        )
    overheads = settings.overheads
    table = {term.name: term.model_dump() for term in overheads.for_version(version)}
    computed = {term.name: term.value_bytes / GIB for term in card_of(settings).overheads}
    if "sampler" in computed:  # the log has it in what it calls outside PyTorch
        seen["non_torch"] = [max(0.0, value - computed["sampler"]) for value in seen["non_torch"]]
    for name, values in seen.items():
        if values:
            table[name] = _fitted(name, values, settings, table.get(name))
    name = f"{settings.device.name}-measured"
    content = {
        "name": name, "device": settings.device.name, "model": overheads.model, "context_gib": overheads.context_gib,
        "terms": list(table.values()),
    }  # fmt: skip
    OverheadSettings.model_validate(content)
    path = (root or Path.cwd()) / "conf" / "overheads" / f"{name}.yaml"
    write_text(path, _yaml(content, settings, len(runs)))
    lines = [
        f"{term['name']}: {term['gib']:.2f} GiB ({term['low_gib']:.2f}–{term['high_gib']:.2f}), "
        + (f"{term['runs']} runs of ours" if term["runs"] else "published figures, no run of ours names it")
        for term in table.values()
    ]
    rest = ", ".join(name for name in computed if name not in table)
    lines += [f"{rest}: computed, no run of ours names them"] if rest else []
    return path, "\n".join(lines)


def _read(path: Path) -> Measurement | MemoryRun:
    """A measured variant, or a start with random weights; both name the memory terms of one engine."""
    content = read_json(path)
    started = isinstance(content, dict) and content.get("kind") == "memory-run"
    return load(path, MemoryRun if started else Measurement)


def _reported(run: Measurement | MemoryRun, name: str) -> float | None:
    """GiB that a run's log gives for a term; `buffers` is what loading added to the checkpoint's bytes."""
    for term in run.reconciliation:
        if name == "buffers" and term.name == "weights" and term.reported_bytes is not None:
            return max(0.0, (term.reported_bytes - run.weight_bytes) / GIB) if run.weight_bytes else None
        if term.name == name and term.reported_bytes is not None:
            return max(0.0, term.reported_bytes / GIB)
    return None


def _fitted(
    name: str, values: list[float], settings: Settings, before: dict[str, Any] | None
) -> dict[str, Any]:
    server = settings.server
    version = server.engine_version
    measured_with = OverheadConfiguration(
        max_num_batched_tokens=rules_of(settings).max_num_batched_tokens,
        max_num_seqs=server.max_num_seqs,
        enforce_eager=server.enforce_eager,
        tensor_parallel=server.tensor_parallel,
    )
    return {
        "name": name,
        "engine_versions": before["engine_versions"] if before else f"=={version}",
        "gib": round(fmean(values), 3),
        "low_gib": round(min(values), 3),
        "high_gib": round(max(values), 3),
        "source": f"own runs on vLLM {version}",
        "runs": len(values),
        "at": measured_with.model_dump(),
    }


def _yaml(content: dict[str, Any], settings: Settings, runs: int) -> str:
    import yaml

    header = (
        f"# Memory overheads on {settings.device.name}, from {runs} measured runs of the profile {settings.profile}.\n"
        "# Written by `quantgate calibrate`; a run's figure is known to half a hundredth of a GiB.\n"
    )
    return header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
