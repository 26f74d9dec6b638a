"""Capacity three ways: predicted by arithmetic, reported by the engine, observed under load."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import fitting_sequences
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name
from pipeline.report.wording import NOT_MEASURED, count, mebibytes, number, sentence
from pipeline.results import Capacity, PlanRow


def section(bundle: ResultBundle) -> Section:
    """The ladder and the memory budget behind it."""
    plan = bundle.plan
    intro = [
        f"What fits on {plan.device} ({mebibytes(plan.device_memory_bytes)}, of which the engine may take "
        f"{100 * plan.memory_utilization:.0f} %): weights and overhead come off first, the rest is the KV pool. "
        f"{plan.required_sequences:,} whole sequences are needed."
    ]
    if plan.device_emulated:
        intro.append(
            "The memory of this device is emulated: a chosen budget, not a card's. "
            "Only the arithmetic and the engine's agreement with it carry over to real hardware."
        )
    tables = [
        capacity_table(bundle),
        budget_table(bundle),
        reconciliation_table(bundle),
        by_hand_table(bundle),
    ]
    return Section("capacity", "Capacity", intro, [table for table in tables if table is not None])


def capacity_table(bundle: ResultBundle) -> Table:
    """Tokens and sequences: predicted, reported, observed."""
    planned = {row.variant: row.capacity for row in bundle.plan.rows}
    rows = []
    for variant in bundle.variants:
        found = bundle.verdict.variants[variant].capacity or planned.get(variant)
        if found is None:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 6])
            continue
        note = found.observed_peak_running_note
        rows.append(
            [
                name(variant),
                figure(count(found.predicted_tokens)),
                figure(count(found.reported_tokens)),
                _agreement(found),
                figure(
                    _banded(found.predicted_fitting_sequences, found.predicted_fitting_band),
                    note=_logged(found.predicted_sequences),
                ),
                figure(count(fitting_sequences(found)), note=_logged(found.reported_sequences)),
                figure(count(found.observed_peak_running), note=sentence(note) if note else ""),
            ]
        )
    return Table(
        "Capacity: predicted, reported, observed",
        [
            Column("Variant"),
            Column("Predicted tokens", "KV budget / kappa, in whole blocks", True),
            Column("Reported tokens", "the engine's log, agreed with its metrics", True),
            Column("Agreement", "reported - predicted"),
            Column("Predicted sequences", "whole ones, one block deducted for the engine's null block", True),
            Column("Reported sequences", "the same from the engine's own token count", True),
            Column("Most running at once", "seen under load; also limited by the highest load level", True),
        ],
        rows,
    )


def _banded(value: int | None, band: tuple[int, int] | None) -> str:
    """The number, with its band where that is wider than a point."""
    if value is None or band is None or band[0] == band[1]:
        return count(value)
    return f"{count(value)} ({band[0]:,}–{band[1]:,})"


def _logged(sequences: float | None) -> str:
    return "" if sequences is None else f"{number(sequences)} as the log counts"


def _agreement(found: Capacity) -> Cell:
    if found.predicted_tokens is None or found.reported_tokens is None:
        return Cell(NOT_MEASURED, "missing")
    difference = found.reported_tokens - found.predicted_tokens
    return Cell("equal to the block" if difference == 0 else f"{difference:+,} tokens".replace("-", "\u2212"))


def budget_table(bundle: ResultBundle) -> Table:
    """Where the memory goes."""
    rows = []
    for row in sorted(bundle.plan.rows, key=lambda entry: _position(bundle, entry)):
        found = row.capacity
        rows.append(
            [
                name(row.variant),
                Cell(row.weights),
                Cell(row.kv_cache_dtype),
                figure(mebibytes(row.weight_bytes)),
                figure(mebibytes(row.overhead_bytes)),
                figure(mebibytes(found.kv_budget_bytes)),
                figure(f"{found.kappa_bytes:,}"),
                figure(f"{found.block_size:,}"),
                figure(f"{found.max_model_len:,}"),
            ]
        )
    return Table(
        "Memory budget",
        [
            Column("Variant"),
            Column("Weights"),
            Column("KV cache"),
            Column("Weights size", numeric=True),
            Column("Overhead", "activations, context, graphs", True),
            Column("KV budget", "bytes granted to the KV pool", True),
            Column("kappa (B/token)", "KV bytes per token", True),
            Column("Block (tokens)", numeric=True),
            Column("max_model_len", "tokens per sequence", True),
        ],
        rows,
    )


def reconciliation_table(bundle: ResultBundle) -> Table | None:
    """Every term of the budget, planned and reported; None where no engine said anything of its terms."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        for term in measured.reconciliation if measured is not None else []:
            if term.reported_bytes is None:
                continue
            verdict = Cell("within its band") if term.within else Cell("outside its band", "bad")
            rows.append(
                [
                    name(variant),
                    Cell(term.name.replace("_", " ")),
                    figure(mebibytes(term.predicted_bytes)),
                    figure(f"{mebibytes(term.low_bytes)} – {mebibytes(term.high_bytes)}"),
                    figure(mebibytes(term.reported_bytes), note=term.note),
                    verdict,
                ]
            )
    if not rows:
        return None
    return Table(
        "Memory terms: planned and reported",
        [
            Column("Variant"),
            Column("Term"),
            Column("Planned", numeric=True),
            Column("Band", numeric=True),
            Column("Reported", "from the engine's log, two decimals of a GiB", True),
            Column("Residual"),
        ],
        rows,
    )


def by_hand_table(bundle: ResultBundle) -> Table | None:
    """From the back-of-the-envelope number to the planned one, term by term; None where the profile has no such figures."""
    rows = [row for row in bundle.plan.rows if row.by_hand is not None]
    if not rows:
        return None
    body = []
    for row in sorted(rows, key=lambda entry: _position(bundle, entry)):
        assert row.by_hand is not None
        steps = [figure(f"{step['sequences']:,}") for step in row.by_hand.steps]
        body.append([name(row.variant), *steps])
    assert rows[0].by_hand is not None
    terms = [str(step["term"]) for step in rows[0].by_hand.steps]
    return Table(
        "Sequences from the hand calculation to the card, one term replaced after another",
        [Column("Variant"), *(Column(term, numeric=True) for term in terms)],
        body,
    )


def _position(bundle: ResultBundle, row: PlanRow) -> int:
    return bundle.variants.index(row.variant) if row.variant in bundle.variants else len(bundle.variants)
