"""Each stage's time by phase, from the records that the stages left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from pipeline.report.bundle import ResultBundle
from pipeline.results import Measurement, Phase, Quality, Quantization, StageTime

FIRST = "environment"
"""The stage that every `dvc repro` runs, and runs first."""
ORDER = (FIRST, "prepare", "quantize", "plan", "measure", "quality", "verdict", "report", "track")


@dataclass(frozen=True)
class StageRow:
    """One stage: `seconds` in all, `phases` of it (the rest is other). `kept`: the last run didn't run it, the figures are those
    of the run that did."""

    stage: str
    seconds: float
    phases: Sequence[Phase]
    kept: bool


@dataclass(frozen=True)
class LastRun:
    """The last `dvc repro`: from its first stage's beginning to its last one's end, and how much of that was spent in stages."""

    seconds: float
    in_stages_s: float


def stage_rows(bundle: ResultBundle) -> list[StageRow]:
    """In the order of the graph. What left neither a record nor a time isn't there."""
    phased = _phased(bundle)
    names = [*bundle.times, *(stage for stage in phased if stage not in bundle.times)]
    rows = []
    for stage in sorted(names, key=lambda name: _place(bundle, name)):
        own = bundle.times.get(stage)
        if stage in phased:
            seconds, phases = phased[stage]
        else:
            seconds, phases = bundle.times[stage].wall_s, ()
        rows.append(StageRow(stage, seconds, phases, FIRST in bundle.times and not _is_fresh(bundle, own)))
    return rows


def last_run(bundle: ResultBundle) -> LastRun | None:
    """None where the machine's stage left no time, as in results of an older version."""
    first = bundle.times.get(FIRST)
    if first is None:
        return None
    fresh = [found for found in bundle.times.values() if _is_fresh(bundle, found)]
    end = max(found.started_at + timedelta(seconds=found.wall_s) for found in fresh)
    return LastRun((end - first.started_at).total_seconds(), sum(found.wall_s for found in fresh))


def phase_text(row: StageRow) -> str:
    """The phases that took half a second or more, in the order in which they came."""
    return ", ".join(
        f"{phase.name} {phase.seconds:,.0f}" for phase in row.phases if round(phase.seconds) >= 1
    )


def phases_of(record: Measurement | Quality | Quantization) -> list[Phase]:
    """A record's phases; a quantizer's are its two children."""
    if isinstance(record, Quantization):
        found = {"quantization": record.quantize_wall_s, "proof": record.proof_wall_s}
        return [Phase(name=name, seconds=seconds) for name, seconds in found.items()]
    return list(record.phases)


def _phased(bundle: ResultBundle) -> dict[str, tuple[float, list[Phase]]]:
    records: dict[str, Measurement | Quality | Quantization | None] = {
        **{f"quantize@{scheme}": record for scheme, record in bundle.quantizations.items()},
        **{f"measure@{variant}": bundle.measurements.get(variant) for variant in bundle.variants},
        **{f"quality@{variant}": bundle.qualities.get(variant) for variant in bundle.variants},
    }
    return {
        stage: (record.wall_s, phases_of(record)) for stage, record in records.items() if record is not None
    }


def _is_fresh(bundle: ResultBundle, found: StageTime | None) -> bool:
    first = bundle.times.get(FIRST)
    return found is not None and first is not None and found.started_at >= first.started_at


def _place(bundle: ResultBundle, stage: str) -> tuple[int, int, str]:
    kind, _, item = stage.partition("@")
    variants = bundle.variants
    return (
        ORDER.index(kind) if kind in ORDER else len(ORDER),
        variants.index(item) if kind != "quantize" and item in variants else -1,
        item,
    )
