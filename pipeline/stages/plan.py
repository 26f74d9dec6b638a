"""Stage `plan`: what should fit, by arithmetic over the checkpoints at hand, before anything is served."""

from __future__ import annotations

import shutil
import sys

from pipeline.capacity import Card, Geometry, Row
from pipeline.files import read_json
from pipeline.models.check import weight_bytes
from pipeline.planning.record import record_of
from pipeline.planning.scenario import card_of, row_of
from pipeline.results import Plan, save
from pipeline.settings import Settings, VariantSettings
from pipeline.stages.context import RESULTS, stage_main, weights_folder


def run(settings: Settings, _: str) -> None:
    rows = []
    shutil.rmtree(RESULTS / "plan", ignore_errors=True)
    for variant in settings.variants.values():
        row, card = _row(settings, variant)
        record = record_of(settings, variant, row, card)
        rows.append(record)
        # A file per variant as well: what a variant is served with depends on its own row and on no other's.
        save(RESULTS / "plan" / f"{variant.name}.json", record)
        print(f"{variant.name:14} {row.pool.tokens:>10,} tokens  {row.pool.fitting_sequences:>5} sequences")
    device = settings.device
    plan = Plan(
        profile=settings.profile,
        model=settings.model.name,
        device=device.name,
        device_emulated=device.emulated,
        device_memory_bytes=device.memory_bytes,
        memory_utilization=device.memory_utilization,
        required_sequences=settings.policy.required_sequences,
        rows=rows,
    )
    save(RESULTS / "plan.json", plan)


def _row(settings: Settings, variant: VariantSettings) -> tuple[Row, Card]:
    """The planner's row for a variant whose checkpoint is at hand, and its card: weights are counted, not computed."""
    folder = weights_folder(variant.weights)
    path = folder / "config.json"
    geometry = Geometry.from_config(read_json(path), str(path))
    card = card_of(settings, variant, geometry)
    return row_of(settings, variant, geometry, card, weight_bytes(folder)), card


if __name__ == "__main__":
    sys.exit(stage_main(run))
