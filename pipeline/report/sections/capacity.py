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
    return Section("capacity", "Capacity", intro, [capacity_table(bundle), budget_table(bundle)])


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
                figure(count(found.predicted_fitting_sequences), note=_logged(found.predicted_sequences)),
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


def _position(bundle: ResultBundle, row: PlanRow) -> int:
    return bundle.variants.index(row.variant) if row.variant in bundle.variants else len(bundle.variants)
