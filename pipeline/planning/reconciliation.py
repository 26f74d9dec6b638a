"""The plan beside what the engine reported: the capacity record completed, and every budget term with its residual."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.capacity.budget import Term
from pipeline.capacity.reconcile import Residual, explain_mismatch, reconcile
from pipeline.errors import EngineFailedError
from pipeline.results import BudgetTerm, Capacity, PlanRow
from pipeline.serving.signals import LogSignals, MetricsSnapshot, reported_capacity


def reconciled(row: PlanRow, log: LogSignals, metrics: MetricsSnapshot) -> tuple[Capacity, list[BudgetTerm]]:
    """The row's capacity with the engine's figures, and the terms of its budget, planned and reported.

    Raises `EngineFailedError` where log and metrics disagree, and where the pool lies outside a planned band that is exact or was
    measured on this card: the message names the term that is off. Outside a band of published or computed figures it is a
    finding about the band: the record says so, and the verdict is held up by it, not the run.
    """
    tokens, sequences = reported_capacity(log, metrics)
    residuals = reconcile(terms_of(row), log.memory_gib)
    planned = row.capacity
    band, disagreement = planned.predicted_tokens_band, None
    if planned.predicted_tokens is not None and band is not None:
        wrong = explain_mismatch(planned.predicted_tokens, band, tokens, residuals)
        if wrong is not None and all(residual.calibrated for residual in residuals):
            raise EngineFailedError(wrong)
        disagreement = wrong
    capacity = planned.model_copy(
        update={
            "disagreement": disagreement,
            "reported_tokens": tokens,
            "reported_sequences": sequences,
            "reported_fitting_sequences": _fitting(planned, metrics.num_gpu_blocks, sequences),
        }
    )
    return capacity, budget_terms(residuals)


def terms_of(row: PlanRow) -> list[Term]:
    """A planned row's terms, the weights first."""
    return [
        Term(term.name, term.predicted_bytes, term.low_bytes, term.high_bytes, term.driver, term.calibrated)
        for term in row.terms
    ]


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
            calibrated=found.calibrated,
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
