"""Stage `verdict`: pair every variant with the reference and decide."""

from __future__ import annotations

import sys
from typing import Literal

from pipeline.capacity import Geometry
from pipeline.files import read_json
from pipeline.load.records import read_records
from pipeline.planning.rescue import ProfileOutlook, ways_of
from pipeline.quality.stream import read_stream
from pipeline.report import verdict_table
from pipeline.results import Measurement, Plan, Quality, load, save
from pipeline.settings import Settings
from pipeline.stages.context import RESULTS, environment, stage_main, weights_folder
from pipeline.verdict.decide import build_verdict
from pipeline.verdict.ladder import with_ladders
from pipeline.verdict.latency import request_latencies
from pipeline.verdict.policy import Policy, Slo, VariantIntent

KV_SCALES: dict[str, Literal["1.0", "checkpoint"]] = {"one": "1.0", "checkpoint": "checkpoint"}
"""A variant's word for its scales -> the provenance's."""


def run(settings: Settings, _: str) -> None:
    names = list(settings.variants)
    measurements = {name: load(RESULTS / "measure" / f"{name}.json", Measurement) for name in names}
    slo = Slo(**settings.slo.model_dump(exclude={"name"}))
    verdict = build_verdict(
        profile=settings.profile,
        reference=settings.reference,
        control=settings.control,
        intents={
            name: VariantIntent(
                weights=variant.weights if settings.quantizes(variant) else "bf16",
                kv_cache_dtype=variant.kv_cache_dtype,
                kv_scales=None if variant.kv_scales is None else KV_SCALES[variant.kv_scales],
                skipped_layers=len(variant.skipped_layers),
                attention_backend=variant.attention_backend,
            )
            for name, variant in settings.variants.items()
        },
        measurements=measurements,
        qualities={name: load(RESULTS / "quality" / f"{name}.json", Quality) for name in names},
        requests={
            name: request_latencies(result, read_records(result.requests_file))
            for name, result in measurements.items()
        },
        policy=Policy(slo=slo, **settings.policy.model_dump(exclude={"name"})),
        device_emulated=settings.device.emulated,
        streams={name: read_stream(RESULTS / "quality" / f"{name}.logprobs.parquet") for name in names},
    )
    plan = load(RESULTS / "plan.json", Plan)
    verdict = verdict.model_copy(
        update={"variants": with_ladders(verdict.variants, ways_of(settings), _outlook(settings, plan))}
    )
    save(RESULTS / "verdict.json", verdict)
    print(verdict_table(verdict, plan))


def _outlook(settings: Settings, plan: Plan) -> ProfileOutlook:
    """What the ladder asks; weights are counted where the plan counted them."""
    counted = {row.weights: row.weight_bytes for row in plan.rows}
    path = weights_folder("bf16") / "config.json"
    return ProfileOutlook(settings, Geometry.from_config(read_json(path), str(path)), environment(), counted)


if __name__ == "__main__":
    sys.exit(stage_main(run))
