"""All results of one run in one value, so that the report and the tracking read exactly the same things."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.results import (
    AnyRecord,
    Environment,
    Measurement,
    Plan,
    Quality,
    Quantization,
    StageTime,
    Verdict,
    load,
)


@dataclass(frozen=True)
class ResultBundle:
    """One run's results by variant name. What is missing is `None` or absent, and shown as not measured."""

    verdict: Verdict
    plan: Plan
    measurements: Mapping[str, Measurement | None]
    qualities: Mapping[str, Quality | None]
    quantizations: Mapping[str, Quantization]
    """Weights scheme -> `results/quantize/<scheme>.json`."""
    environment: Environment
    timelines: Mapping[str, list[dict[str, Any]]]
    """Variant -> server metrics, one row per sample: t_s (monotonic), running, waiting, kv_usage (0..1), …"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The settings behind the numbers: group ("policy", "slo", "load", "evalset", …) -> key -> value, and
    "variants": variant -> one line of description."""

    times: Mapping[str, StageTime] = field(default_factory=dict)
    """Stage, with its item (measure@awq), -> when it last ran here."""

    @property
    def variants(self) -> list[str]:
        """Variant names, the reference first, then the A/A control, then as the verdict lists them."""
        first = [self.verdict.reference, self.verdict.control]
        names = list(self.verdict.variants)
        return [name for name in first if name in names] + [name for name in names if name not in first]


def load_bundle(folder: str | Path, facts: Mapping[str, Any]) -> ResultBundle:
    """Read `results/` as the stages left it. Only the verdict, the plan and the environment must be there.

    Raises `UserInputError` naming the file that is missing or was written by another version.
    """
    root = Path(folder)
    verdict = load(root / "verdict.json", Verdict)
    return ResultBundle(
        verdict=verdict,
        plan=load(root / "plan.json", Plan),
        measurements={
            name: _optional(root / "measure" / f"{name}.json", Measurement) for name in verdict.variants
        },
        qualities={name: _optional(root / "quality" / f"{name}.json", Quality) for name in verdict.variants},
        quantizations={
            path.stem: load(path, Quantization) for path in sorted((root / "quantize").glob("*.json"))
        },
        environment=load(root / "environment.json", Environment),
        timelines={name: _timeline(root / "measure", name) for name in verdict.variants},
        facts=facts,
        times={found.stage: found for found in _times(root / "time")},
    )


def _times(folder: Path) -> list[StageTime]:
    return [load(path, StageTime) for path in sorted(folder.glob("*.json"))]


def _optional(path: Path, kind: type[AnyRecord]) -> AnyRecord | None:
    return load(path, kind) if path.exists() else None


def _timeline(folder: Path, variant: str) -> list[dict[str, Any]]:
    """The rows of `<variant>.timeline.jsonl`, or none: the plots then show nothing for it."""
    path = folder / f"{variant}.timeline.jsonl"
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserInputError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
        if not isinstance(row, dict) or not isinstance(row.get("t_s"), (int, float)):
            raise UserInputError(f"{path}, line {number}: no number under the key t_s")
        rows.append(row)
    return rows
