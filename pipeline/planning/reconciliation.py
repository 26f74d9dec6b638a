"""The plan beside what the engine reported: the capacity record completed, and every budget term with its residual."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.capacity.reconcile import Residual, explain_mismatch, reconcile
from pipeline.errors import EngineFailedError
from pipeline.planning.scenario import card_of
from pipeline.results import BudgetTerm, Capacity, PlanRow
from pipeline.serving.signals import LogSignals, MetricsSnapshot, reported_capacity
from pipeline.settings import Settings


def reconciled(
    settings: Settings, row: PlanRow, log: LogSignals, metrics: MetricsSnapshot
) -> tuple[Capacity, list[BudgetTerm]]:
    """The row's capacity with the engine's figures, and the terms of its budget, planned and reported.

    Raises `EngineFailedError` where log and metrics disagree, and where the pool lies outside the planned band: then the
    message names the term that is off.
    """
    tokens, sequences = reported_capacity(log, metrics)
    residuals = reconcile(card_of(settings), row.weight_bytes, log.memory_gib)
    planned = row.capacity
    band = planned.predicted_tokens_band
    if planned.predicted_tokens is not None and band is not None:
        wrong = explain_mismatch(planned.predicted_tokens, band, tokens, residuals)
        if wrong is not None:
            raise EngineFailedError(wrong)
    capacity = planned.model_copy(
        update={
            "reported_tokens": tokens,
            "reported_sequences": sequences,
            "reported_fitting_sequences": _fitting(planned, metrics.num_gpu_blocks, sequences),
        }
    )
    return capacity, budget_terms(residuals)


def budget_terms(residuals: Sequence[Residual]) -> list[BudgetTerm]:
    """Planned and reported terms as a result file keeps them."""
    return [
        BudgetTerm(
            name=found.name,
            predicted_bytes=found.predicted,
            low_bytes=found.low,
            high_bytes=found.high,
            reported_bytes=found.reported,
            within=found.within,
            note=found.note,
        )
        for found in residuals
    ]


def _fitting(planned: Capacity, blocks: int | None, sequences: float) -> int | None:
    """Whole sequences in the reported pool; from its concurrency, known to two digits, where its blocks aren't on the page."""
    each = planned.blocks_per_sequence
    if each is None:
        return None
    count = blocks if blocks is not None else round(sequences * each)
    return max(0, count - 1) // each
