"""`quantgate calibrate`: the overheads that our own runs really had, as a new option in conf/overheads/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.capacity import GIB
from pipeline.errors import UserInputError
from pipeline.files import read_json, write_text
from pipeline.planning.card import card_of
from pipeline.results import Measurement, MemoryRun, load
from pipeline.settings import Settings
from pipeline.settings.overheads import OverheadSettings

CARD_TOLERANCE_BYTES = GIB // 10
"""Drivers differ in what they reserve of one card; less than the narrowest band of what isn't computed (conf/overheads/rtx4090.yaml)."""
TERMS = ("buffers", "activation", "non_torch", "cuda_graphs")
REPEAT_GIB = 0.01
"""By so much starts of one configuration differ in the log: 0.86 and 0.87 GiB of graphs, else nothing, in 7 and 8 H100 starts of Qwen2.5-7B
and Llama-3.1-8B (tests/unit/capacity/public_overheads.yaml)."""


def calibrate(settings: Settings, files: Sequence[Path], root: Path | None = None) -> tuple[Path, str]:
    """Fit every term that the runs' logs name; the others stay as they are. Returns the file and a summary.

    A fitted term is the mean over the runs with one driver (so many batched tokens, sequences, graphs), its band their lowest and highest
    and `REPEAT_GIB` more. It stands in the plan of that driver; for another the model's figure is scaled by measured / model, and
    counts as computed (`pipeline.planning.card.measured`). Raises `UserInputError` where no run names a
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
    modelled = settings.overheads.model is not None
    seen: dict[tuple[str, str | None], list[Seen]] = {}
    for path, run in zip(files, runs, strict=True):
        for one in map(partial(_seen, run), TERMS):
            if one is not None and modelled and not one.driver:
                raise UserInputError(f"{path}: its terms don't say what drove them; measure it again")
            # Where the model has nothing, as of graphs in eager mode, there is nothing to fit.
            if one is not None and (one.model_gib or not modelled):
                seen.setdefault((one.name, one.driver if modelled else None), []).append(one)
    if not seen:
        raise UserInputError(
            f"none of {len(runs)} runs logged a memory term"
            + (": the device is an emulated budget, which has none" if settings.device.emulated else "")
        )
    table = {(term.name, term.driver): term.model_dump() for term in settings.overheads.for_version(version)}
    for key, values in sorted(seen.items(), key=lambda item: TERMS.index(item[0][0])):
        table[key] = _fitted(key[1], values, version, table.get(key))
    name = f"{settings.device.name}-measured"
    content: dict[str, Any] = {"name": name, "device": settings.device.name, "terms": list(table.values())}
    if settings.overheads.model is not None:
        content["model"] = settings.overheads.model.model_dump()
    OverheadSettings.model_validate(content)
    path = (root or Path.cwd()) / "conf" / "overheads" / f"{name}.yaml"
    write_text(path, _yaml(content, settings, len(runs)))
    return path, "\n".join([*map(_line, table.values()), *_unseen(settings, table)])


def _line(term: dict[str, Any]) -> str:
    figures = f"{term['gib']:.2f} GiB ({term['low_gib']:.2f}–{term['high_gib']:.2f})"
    by = f"{term['runs']} runs of ours" if term["runs"] else "published figures, no run of ours names it"
    return f"{term['name']}: {figures}, {by}" + (f": {term['driver']}" if term["driver"] else "")


def _unseen(settings: Settings, table: Mapping[tuple[str, str | None], Any]) -> list[str]:
    """The profile's terms that stay computed: other drivers than any run had, scaled where another of the same name was measured."""
    found: dict[tuple[str, str], None] = {}
    if settings.overheads.model is None:
        return []
    for variant in settings.variants.values():
        for term in card_of(settings, variant).overheads:
            if term.name in TERMS and (term.name, term.driver) not in table:
                found[term.name, term.driver] = None
    return [f"{name}: computed, no run of ours has it: {driver}" for name, driver in found]


def _read(path: Path) -> Measurement | MemoryRun:
    """A measured variant, or a start with random weights; both name the memory terms of one engine."""
    content = read_json(path)
    started = isinstance(content, dict) and content.get("kind") == "memory-run"
    return load(path, MemoryRun if started else Measurement)


@dataclass(frozen=True)
class Seen:
    """One run's figure for a term, GiB, what drove it, and what the model says of that (0: nothing)."""

    name: str
    gib: float
    driver: str
    model_gib: float


def _seen(run: Measurement | MemoryRun, name: str) -> Seen | None:
    """A term as a run's log gives it; `buffers` is what loading added to the checkpoint's bytes."""
    for term in run.reconciliation:
        if term.reported_bytes is None:
            continue
        model = term.predicted_bytes if term.model_bytes is None else term.model_bytes
        if name == "buffers" and term.name == "weights" and run.weight_bytes:
            # The record has them in one; the model's figure is known for the buffers, or for both.
            model -= run.weight_bytes if model > run.weight_bytes else 0
            added = max(0.0, (term.reported_bytes - run.weight_bytes) / GIB)
            return Seen(name, added, term.driver, max(0, model) / GIB)
        if term.name == name:
            return Seen(name, max(0.0, term.reported_bytes / GIB), term.driver, model / GIB)
    return None


def _fitted(
    driver: str | None, seen: list[Seen], version: str, before: dict[str, Any] | None
) -> dict[str, Any]:
    values = [one.gib for one in seen]
    return {
        "name": seen[0].name,
        "engine_versions": before["engine_versions"] if before else f"=={version}",
        "gib": round(fmean(values), 3),
        "low_gib": round(max(0.0, min(values) - REPEAT_GIB), 3),
        "high_gib": round(max(values) + REPEAT_GIB, 3),
        "source": f"own runs on vLLM {version}",
        "runs": len(values),
        "driver": driver,
        "model_gib": None if driver is None else round(fmean(one.model_gib for one in seen), 4),
    }


def _yaml(content: dict[str, Any], settings: Settings, runs: int) -> str:
    import yaml

    header = (
        f"# Memory overheads on {settings.device.name}, from {runs} measured runs of the profile {settings.profile}.\n"
        "# Written by `quantgate calibrate`; a run's figure is known to half a hundredth of a GiB.\n"
    )
    return header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
