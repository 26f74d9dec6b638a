"""The plan beside what the engine reported: the capacity record completed, and every budget term with its residual."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.capacity import GIB, Term
from pipeline.capacity.reconcile import Residual, explain_mismatch, reconcile
from pipeline.errors import EngineFailedError
from pipeline.results import BudgetTerm, Capacity, PlanRow
from pipeline.serving.signals import LogSignals, MetricsSnapshot, reported_capacity


def reconciled(row: PlanRow, log: LogSignals, metrics: MetricsSnapshot) -> tuple[Capacity, list[BudgetTerm]]:
    """The row's capacity with the engine's figures, and the terms of its budget, planned and reported.

    Where the pool lies outside the planned band because of a term that was computed but never measured on this card, the record says
    so and the run goes on: the band is what isn't known. Raises `EngineFailedError` where log and metrics disagree, and where what
    is off was exact or measured here.
    """
    tokens, sequences = reported_capacity(log, metrics)
    residuals = reconcile(terms_of(row), log.memory_gib)
    planned = row.capacity
    band, wrong = planned.predicted_tokens_band, None
    if planned.predicted_tokens is not None and band is not None:
        budget = _budget_gib(planned, log)
        wrong = explain_mismatch(planned.predicted_tokens, band, tokens, residuals, budget)
        if wrong is not None and wrong.settled:
            raise EngineFailedError(wrong.text)
    capacity = planned.model_copy(
        update={
            "disagreement": None if wrong is None else wrong.text,
            "reported_tokens": tokens,
            "reported_sequences": sequences,
            "reported_fitting_sequences": _fitting(planned, metrics.num_gpu_blocks, sequences),
        }
    )
    return capacity, budget_terms(residuals)


def terms_of(row: PlanRow) -> list[Term]:
    """The terms that a row was planned with, the weights first."""
    return [
        Term(
            term.name,
            term.predicted_bytes,
            term.low_bytes,
            term.high_bytes,
            term.driver,
            runs=term.runs,
            model_bytes=term.model_bytes,
        )
        for term in row.terms
    ]


def _budget_gib(planned: Capacity, log: LogSignals) -> tuple[float, float] | None:
    """The pool's memory, planned and as the log has it."""
    reported = log.memory_gib.get("available_kv_cache_gib")
    if reported is None or planned.kv_budget_bytes is None:
        return None
    return planned.kv_budget_bytes / GIB, reported


def budget_terms(residuals: Sequence[Residual]) -> list[BudgetTerm]:
    """Planned and reported terms as a result file keeps them."""
    return [
        BudgetTerm(
            name=found.name,
            predicted_bytes=found.term.value_bytes,
            low_bytes=found.term.low_bytes,
            high_bytes=found.term.high_bytes,
            reported_bytes=found.reported,
            within=found.within,
            driver=found.term.driver,
            runs=found.term.runs,
            model_bytes=found.term.model_bytes,
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
