"""A planned row as a result file keeps it."""

from __future__ import annotations

from pipeline.capacity import Card, Row
from pipeline.capacity.reconcile import planned_terms
from pipeline.planning.scenario import by_hand_of
from pipeline.results import BudgetTerm, Capacity, PlanRow
from pipeline.settings import Settings, VariantSettings


def record_of(settings: Settings, variant: VariantSettings, row: Row, card: Card) -> PlanRow:
    """The record of a variant's row on `card`."""
    return PlanRow(
        variant=variant.name,
        weights=variant.weights,
        kv_cache_dtype=variant.kv_cache_dtype,
        weight_bytes=row.weight_bytes,
        overhead_bytes=card.overhead_bytes,
        terms=[
            BudgetTerm(
                name=term.name,
                predicted_bytes=term.value_bytes,
                low_bytes=term.low_bytes,
                high_bytes=term.high_bytes,
                driver=term.driver,
                calibrated=term.calibrated or term.is_exact,
            )
            for term in planned_terms(card, row.weight_bytes)
        ],
        by_hand=by_hand_of(settings, row, card),
        capacity=_capacity(row),
    )


def _capacity(row: Row) -> Capacity:
    """The predicted half of a capacity record; the engine's half is still null."""
    pools = (row.pool_low, row.pool_high)
    return Capacity(
        max_model_len=row.pool.max_model_len,
        block_size=row.pool.block_size,
        kappa_bytes=row.kappa_bytes,
        block_bytes=max(row.layout.block_bytes),
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
