"""Beside the accuracy: next-token divergence, the set's further tasks, and how the prompts were put."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.report.bundle import ResultBundle
from pipeline.report.table import Cell, Column, Table, figure, name
from pipeline.report.wording import (
    NOT_MEASURED,
    count,
    number,
    percent,
    percent_interval,
    points,
    points_interval,
)
from pipeline.results import Divergence, Estimate


def divergence_tables(bundle: ResultBundle) -> list[Table]:
    """One row per variant that scored the reference's stream; the A/A control's row is the floor."""
    rows = []
    for variant in bundle.variants:
        found = bundle.verdict.variants[variant].divergence
        if found is not None:
            note = "A/A control" if variant == bundle.verdict.control else ""
            rows.append([name(variant, note=note), *_divergence_cells(found)])
    if not rows:
        return []
    columns = [
        Column("Variant"),
        Column("Perplexity ratio", "variant / reference on the stream", True),
        Column("KL divergence (nats)", "mean, top-k-truncated", True),
        Column("KL percentiles", "50 / 90 / 99 % of the tokens are below", True),
        Column("Same likeliest token", "share of the tokens", True),
        Column("RMS Δp (pt)", "root mean square change of the stream's token's probability", True),
        Column("Δp percentiles (pt)", "1 / 5 / 50 / 95 / 99 %", True),
    ]
    return [Table("Divergence from the reference (± is one standard error)", columns, rows)]


def _divergence_cells(found: Divergence) -> list[Cell]:
    return [
        _estimate_cell(found.perplexity_ratio, 4, note=f"perplexity {number(found.perplexity)}"),
        _estimate_cell(found.kl, 5),
        figure(
            " / ".join(number(e.value, 4) for e in found.kl_percentiles.values()),
            note=_errors(found.kl_percentiles, 4),
        ),
        _estimate_cell(found.same_top1, 2, 100, " %"),
        _estimate_cell(found.delta_p_rms, 2, 100),
        figure(
            " / ".join(number(100 * e.value, 1) for e in found.delta_p_percentiles.values()),
            note=_errors(found.delta_p_percentiles, 1, 100),
        ),
    ]


def _estimate_cell(found: Estimate, digits: int, scale: float = 1, unit: str = "", note: str = "") -> Cell:
    lines = [note] if note else []
    if found.se is not None:
        lines.insert(0, f"± {number(scale * found.se, digits)}")
    return figure(f"{number(scale * found.value, digits)}{unit}", note="\n".join(lines))


def _errors(found: Mapping[str, Estimate], digits: int, scale: float = 1) -> str:
    if any(one.se is None for one in found.values()):
        return ""
    return "± " + " / ".join(number(scale * (one.se or 0.0), digits) for one in found.values())


def further_tables(bundle: ResultBundle) -> list[Table]:
    """The set's further tasks: change where answers are right or wrong, perplexity ratio where texts are measured."""
    tables = []
    tasks = {task for found in bundle.qualities.values() if found for task in found.further}
    for task in sorted(tasks):
        rows = []
        for variant in bundle.variants:
            own, result = bundle.qualities.get(variant), bundle.verdict.variants[variant]
            scores = own.further.get(task) if own else None
            if scores is None:
                rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 4])
                continue
            delta, ratio = result.further.get(task), result.perplexity_ratios.get(task)
            change = Cell("–")
            if ratio is not None:
                change = _estimate_cell(ratio, 4, note="× the reference's byte perplexity")
            elif delta is not None and variant != bundle.verdict.reference:
                change = figure(points(delta.delta), note=points_interval(delta.delta_ci))
            flips = count(delta.flips) if delta and variant != bundle.verdict.reference else "–"
            floor = f"A/A {count(delta.noise_floor_flips)}" if delta else ""
            accuracy = figure(
                percent(scores.accuracy),
                note=percent_interval(scores.accuracy_ci) if scores.accuracy_ci else "",
            )
            rows.append([name(variant), figure(count(scores.n)), accuracy, change, figure(flips, note=floor)])
        columns = [
            Column("Variant"),
            Column("Items", numeric=True),
            Column("Accuracy", "with its confidence interval", True),
            Column("Change (pt)", "variant - reference, with its confidence interval", True),
            Column("Flips", numeric=True),
        ]
        tables.append(Table(f"Further task {task}", columns, rows))
    return tables


def format_tables(bundle: ResultBundle) -> list[Table]:
    """How the tasks were put to each variant, and what came back empty or cut."""
    rows = []
    for variant in bundle.variants:
        own = bundle.qualities.get(variant)
        if own is None or own.format is None:
            continue
        for task, found in {own.task: own.format, **{t: s.format for t, s in own.further.items()}}.items():
            shown = (found.truncated_prompts, found.empty_answers, found.cut_answers)
            rows.append(
                [
                    name(variant),
                    Cell(task, "text"),
                    Cell("applied" if found.chat_template else "not applied"),
                    figure(count(found.bos_tokens)),
                    *[figure(count(value)) for value in shown],
                ]
            )
    columns = [
        Column("Variant"),
        Column("Task"),
        Column("Chat template"),
        Column("BOS tokens", "that a prompt begins with, counted", True),
        Column("Prompts cut", numeric=True),
        Column("Empty answers", numeric=True),
        Column("Answers cut", "at the token limit", True),
    ]
    return [Table("How the prompts were put", columns, rows)] if rows else []
