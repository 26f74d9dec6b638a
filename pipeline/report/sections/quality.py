"""Quality paired against the reference: deltas with intervals, beside the A/A control, overall and by slice."""

from __future__ import annotations

from typing import Any

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import control_summary
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name
from pipeline.report.wording import (
    NOT_MEASURED,
    count,
    listing,
    percent,
    percent_interval,
    points,
    points_interval,
    probability,
)
from pipeline.results import QualityDelta, SliceScore

HEAT_FULL_SCALE = 0.10
"""Accuracy difference that gets the full tint: 10 points, about what a slice of 50 items can show at all."""
NOISE_TINT = 0.2
"""Share of the tint that is left where the interval covers 0: noise must not look like a finding."""


def section(bundle: ResultBundle) -> Section:
    """Deltas, flips, slices."""
    known = next((result.quality for result in bundle.verdict.variants.values() if result.quality), None)
    intro = [control_summary(bundle.verdict)]
    if known is not None:
        intro.insert(
            0,
            f"Every variant answers the same items, so the change is taken item by item. The limit is a loss of "
            f"{100 * known.margin:.1f} points: GO if the whole {100 * known.confidence:.0f} % interval lies above it, "
            "NO-GO if the whole interval lies below, otherwise INCONCLUSIVE.",
        )
    sets = sorted({f"{found.evalset} ({found.n:,} items)" for found in bundle.qualities.values() if found})
    if sets:
        intro.append(f"Eval set: {listing(sets)}.")
    return Section(
        "quality",
        "Quality",
        intro,
        [delta_table(bundle), slice_delta_table(bundle), slice_accuracy_table(bundle)],
    )


def delta_table(bundle: ResultBundle) -> Table:
    """One row per variant, the control's flips beside its own."""
    rows = []
    for variant in bundle.variants:
        delta = bundle.verdict.variants[variant].quality
        own = bundle.qualities.get(variant)
        if variant == bundle.verdict.reference and own is not None:
            accuracy = figure(percent(own.accuracy), note=percent_interval(own.accuracy_ci))
            rows.append([name(variant, note="reference"), figure(count(own.n)), accuracy, *[Cell("–")] * 6])
        elif delta is None:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 8])
        else:
            note = "A/A control" if variant == bundle.verdict.control else ""
            rows.append([name(variant, note=note), *_delta_cells(delta)])
    return Table(
        "Accuracy change against the reference",
        [
            Column("Variant"),
            Column("Items", numeric=True),
            Column("Accuracy", "with its confidence interval", True),
            Column("Change (pt)", "variant - reference, with its confidence interval", True),
            Column("Flips", "items whose correctness changed: lost + gained", True),
            Column("A/A flips", "the same for the reference run twice", True),
            Column("Changed answers", "items whose chosen answer changed, right or wrong; A/A below", True),
            Column("McNemar p", "exact test that losses and gains are equally likely", True),
            Column("Items to decide", "how many items would decide it if the true change were 0", True),
        ],
        rows,
    )


def _delta_cells(delta: QualityDelta) -> list[Cell]:
    decided = delta.items_to_decide is None and delta.delta is not None
    return [
        figure(count(delta.n)),
        figure(percent(delta.accuracy), note=_unless_missing(percent_interval(delta.accuracy_ci))),
        figure(points(delta.delta), note=_unless_missing(points_interval(delta.delta_ci))),
        figure(
            count(delta.flips),
            note="" if delta.flips_lost is None else f"{delta.flips_lost} lost + {delta.flips_gained} gained",
        ),
        figure(count(delta.noise_floor_flips)),
        figure(count(delta.changed_answers), note=f"A/A {count(delta.noise_floor_changed_answers)}"),
        figure(probability(delta.mcnemar_p)),
        Cell("decided") if decided else figure(count(delta.items_to_decide)),
    ]


def _unless_missing(text: str) -> str:
    return "" if text == NOT_MEASURED else text


def slice_delta_table(bundle: ResultBundle) -> Table:
    """Slices down, variants across: the change in points, tinted, with its interval."""
    compared = [variant for variant in bundle.variants if variant != bundle.verdict.reference]
    deltas = {variant: bundle.verdict.variants[variant].quality for variant in compared}
    slices = sorted({label for delta in deltas.values() if delta for label in delta.slices})
    rows = [
        [
            name(label, note=_items(deltas, label)),
            *[_slice_cell(deltas[variant], label) for variant in compared],
        ]
        for label in slices
    ]
    columns = [
        Column(variant, "A/A control" if variant == bundle.verdict.control else "", True)
        for variant in compared
    ]
    return Table(
        "Change by slice (pt; strong tint where the interval excludes 0)", [Column("Slice"), *columns], rows
    )


def _items(deltas: dict[str, QualityDelta | None], label: str) -> str:
    sizes = {delta.slices[label].get("n") for delta in deltas.values() if delta and label in delta.slices}
    return " / ".join(f"{size:,} items" for size in sorted(size for size in sizes if size is not None))


def _slice_cell(delta: QualityDelta | None, label: str) -> Cell:
    found: dict[str, Any] = {} if delta is None else delta.slices.get(label, {})
    change = found.get("delta")
    if change is None:
        return Cell(NOT_MEASURED, "missing")
    interval = found.get("delta_ci")
    heat = max(-1.0, min(1.0, change / HEAT_FULL_SCALE))
    if interval is None or interval[0] <= 0 <= interval[1]:
        heat *= NOISE_TINT
    return figure(points(change), note=_unless_missing(points_interval(interval)), heat=heat)


def slice_accuracy_table(bundle: ResultBundle) -> Table:
    """Slices down, variants across: accuracy with its interval, beside chance."""
    found = {variant: bundle.qualities.get(variant) for variant in bundle.variants}
    scores: dict[str, SliceScore] = {}
    for own in found.values():
        scores = {**(own.slices if own else {}), **scores}
    rows = []
    for label in sorted(scores):
        cells = []
        for own in found.values():
            score = own.slices.get(label) if own else None
            if score is None:
                cells.append(Cell(NOT_MEASURED, "missing"))
            else:
                above = "" if score.ci[0] > score.chance else "\nnot above chance"
                cells.append(figure(percent(score.accuracy), note=f"{percent_interval(score.ci)}{above}"))
        rows.append([name(label), figure(percent(scores[label].chance, 0)), *cells])
    return Table(
        "Accuracy by slice",
        [
            Column("Slice"),
            Column("Chance", "accuracy of guessing", True),
            *[Column(variant, numeric=True) for variant in found],
        ],
        rows,
    )
