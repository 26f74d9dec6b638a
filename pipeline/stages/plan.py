"""Stage `plan`: what should fit, by arithmetic over the checkpoints at hand, before anything is served."""

from __future__ import annotations

import shutil
import sys

from pipeline.capacity import Card, Geometry, Row
from pipeline.capacity.reconcile import planned_terms
from pipeline.files import read_json
from pipeline.models.check import weight_bytes
from pipeline.planning.scenario import by_hand_of, card_of, row_of
from pipeline.results import BudgetTerm, Capacity, Plan, PlanRow, save
from pipeline.settings import Settings, VariantSettings
from pipeline.stages.context import RESULTS, stage_main, weights_folder


def run(settings: Settings, _: str) -> None:
    rows = []
    card = card_of(settings)
    shutil.rmtree(RESULTS / "plan", ignore_errors=True)
    for variant in settings.variants.values():
        row = _row(settings, variant, card)
        record = PlanRow(
            variant=variant.name,
            weights=variant.weights,
            kv_cache_dtype=variant.kv_cache_dtype,
            weight_bytes=row.weight_bytes,
            overhead_bytes=card.overhead_bytes,
            terms=[
                BudgetTerm(
                    name=term.name, predicted_bytes=term.value_bytes, low_bytes=term.low_bytes, high_bytes=term.high_bytes
                )
                for term in planned_terms(card, row.weight_bytes)
            ],
            by_hand=by_hand_of(settings, row, card),
            capacity=_capacity(row),
        )  # fmt: skip
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


def _row(settings: Settings, variant: VariantSettings, card: Card) -> Row:
    """The planner's row for a variant whose checkpoint is at hand: weights are counted, not computed."""
    folder = weights_folder(variant.weights)
    path = folder / "config.json"
    geometry = Geometry.from_config(read_json(path), str(path))
    return row_of(settings, variant, geometry, card, weight_bytes(folder))


def _capacity(row: Row) -> Capacity:
    """The predicted half of a capacity record; the engine's half is still null."""
    pools = (row.pool_low, row.pool_high)
    return Capacity(
        max_model_len=row.pool.max_model_len,
        block_size=row.pool.block_size,
        kappa_bytes=row.kappa_bytes,
        kv_budget_bytes=row.budget.bytes,
        blocks_per_sequence=row.pool.blocks_per_sequence,
        predicted_tokens=row.pool.tokens,
        predicted_tokens_band=(pools[0].tokens, pools[1].tokens),
        predicted_sequences=round(row.pool.logged_sequences, 2),
        predicted_fitting_sequences=row.pool.fitting_sequences,
        predicted_fitting_band=(pools[0].fitting_sequences, pools[1].fitting_sequences),
        reported_tokens=None,
        reported_sequences=None,
        observed_peak_running=None,
    )


if __name__ == "__main__":
    sys.exit(stage_main(run))
