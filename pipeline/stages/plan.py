"""Stage `plan`: what should fit, by arithmetic over the checkpoints at hand, before anything is served."""

from __future__ import annotations

import shutil
import sys

from pipeline.capacity import Geometry
from pipeline.capacity.plan import Card, Row, plan_row
from pipeline.files import read_json
from pipeline.models.check import weight_bytes
from pipeline.results import Capacity, Plan, PlanRow, save
from pipeline.settings import Settings, VariantSettings
from pipeline.stages.context import RESULTS, stage_main, weights_folder


def run(settings: Settings, _: str) -> None:
    rows = []
    shutil.rmtree(RESULTS / "plan", ignore_errors=True)
    for variant in settings.variants.values():
        row = _row(settings, variant)
        record = PlanRow(
            variant=variant.name,
            weights=variant.weights,
            kv_cache_dtype=variant.kv_cache_dtype,
            weight_bytes=row.weight_bytes,
            overhead_bytes=settings.device.overhead_bytes,
            capacity=_capacity(row),
        )
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


def _row(settings: Settings, variant: VariantSettings) -> Row:
    """The planner's row for a variant whose checkpoint is at hand: weights are counted, not computed."""
    folder = weights_folder(variant.weights)
    path = folder / "config.json"
    device = settings.device
    return plan_row(
        variant.name,
        variant.weights,
        variant.kv_cache_dtype,
        Geometry.from_config(read_json(path), str(path)),
        weight_bytes(folder),
        Card(device.memory_bytes, device.memory_utilization, device.overhead_bytes),
        settings.server.block_size,
        settings.server.max_model_len,
    )


def _capacity(row: Row) -> Capacity:
    """The predicted half of a capacity record; the engine's half is still null."""
    return Capacity(
        max_model_len=row.pool.max_model_len,
        block_size=row.pool.block_size,
        kappa_bytes=row.kappa_bytes,
        kv_budget_bytes=row.budget_bytes,
        predicted_tokens=row.pool.tokens,
        predicted_sequences=round(float(row.pool.logged_sequences), 2),
        predicted_fitting_sequences=row.pool.fitting_sequences,
        reported_tokens=None,
        reported_sequences=None,
        observed_peak_running=None,
    )


if __name__ == "__main__":
    sys.exit(stage_main(run))
