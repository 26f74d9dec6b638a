"""Quality paired against the reference: deltas with intervals, beside the A/A control, overall and by slice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import control_summary
from pipeline.report.sections.base import Section
from pipeline.report.sections.divergence import divergence_tables, format_tables, further_tables
from pipeline.report.sections.flips import flip_tables
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
"""Share of the tint that is left where a slice's p, corrected for the number of slices, isn't small: noise must not look
like a finding."""


BATCHING = {
    "served": "Items are scored batched, as the server is deployed: an answer's last bits depend on what it is computed beside, and "
    "the A/A control measures how many answers that changes.",
    "serial": "Items are scored one at a time, so that runs repeat bit by bit. A deployed server batches, and its answers may differ "
    "in their last bits from these.",
    "invariant": "Items are scored on the engine's batch-invariant kernels, so that runs repeat bit by bit. They aren't the kernels "
    "that get deployed: what those lose is not in these figures.",
}
"""How the items were computed together (`quality.batching`), in words."""


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
    streams = [result.divergence for result in bundle.verdict.variants.values() if result.divergence]
    if streams:
        first = streams[0]
        intro.append(
            f"The divergence compares next-token distributions on one fixed stream of {first.prompts:,} prompts with what the "
            f"reference says next ({first.tokens:,} tokens, sha256 {first.stream_sha256[:12]}). It decides earlier than "
            "accuracy and says less: how close a variant is to the reference, not whether anyone would mind. The KL "
            f"divergence knows the {first.top_k} likeliest tokens of both sides and lumps the rest, "
            f"{percent(first.kl_tail_mass)} of the reference's mass, which makes it a lower bound."
        )
    sets = sorted({f"{found.evalset} ({found.n:,} items)" for found in bundle.qualities.values() if found})
    if sets:
        intro.append(f"Eval set: {listing(sets)}.")
    modes = {found.batching for found in bundle.qualities.values() if found and found.batching}
    intro += [BATCHING[mode] for mode in sorted(modes)]
    return Section(
        "quality",
        "Quality",
        intro,
        [
            delta_table(bundle),
            *divergence_tables(bundle),
            *further_tables(bundle),
            slice_delta_table(bundle),
            slice_accuracy_table(bundle),
            *format_tables(bundle),
            *flip_tables(bundle),
        ],
    )


def delta_table(bundle: ResultBundle) -> Table:
    """One row per variant, the control's flips beside its own."""
    rows = []
    for variant in bundle.variants:
        delta = bundle.verdict.variants[variant].quality
        own = bundle.qualities.get(variant)
        if variant == bundle.verdict.reference and own is not None:
            accuracy = figure(percent(own.accuracy), note=percent_interval(own.accuracy_ci))
            rows.append([name(variant, note="reference"), figure(count(own.n)), accuracy, *[Cell("–")] * 7])
        elif delta is None:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 9])
        else:
            note = "A/A control" if variant == bundle.verdict.control else ""
            rows.append([name(variant, note=note), *_delta_cells(delta)])
    return Table(
        "Accuracy change against the reference",
        [
            Column("Variant"),
            Column("Items", numeric=True),
            Column("Accuracy", "with its confidence interval", True),
            Column(
                "Change (pt)",
                "variant - reference, with the score interval that decides, and the bootstrap's beside it",
                True,
            ),
            Column(
                "Flips", "items whose correctness changed: lost + gained; noise where not above the A/A", True
            ),
            Column("A/A flips", "the same for the reference run twice", True),
            Column("Changed answers", "items whose chosen answer changed, right or wrong; A/A below", True),
            Column("McNemar p", "exact test that losses and gains are equally likely", True),
            Column("Items to decide", "how many items would decide it if the true change were 0", True),
            Column(
                "Smallest margin (pt)",
                "that these items would have decided, in 4 of 5 cases, at no change",
                True,
            ),
        ],
        rows,
    )


def _delta_cells(delta: QualityDelta) -> list[Cell]:
    decided = delta.items_to_decide is None and delta.delta is not None
    return [
        figure(count(delta.n)),
        figure(percent(delta.accuracy), note=_unless_missing(percent_interval(delta.accuracy_ci))),
        figure(points(delta.delta), note=_intervals(delta)),
        figure(
            count(delta.flips),
            note="" if delta.flips_lost is None else f"{delta.flips_lost} lost + {delta.flips_gained} gained",
            tags=("noise",) if delta.within_noise and delta.flips else (),
        ),
        figure(count(delta.noise_floor_flips)),
        figure(count(delta.changed_answers), note=f"A/A {count(delta.noise_floor_changed_answers)}"),
        figure(probability(delta.mcnemar_p)),
        Cell("decided") if decided else figure(count(delta.items_to_decide)),
        figure(NOT_MEASURED if delta.smallest_margin is None else f"{100 * delta.smallest_margin:.1f}"),
    ]


def _intervals(delta: QualityDelta) -> str:
    lines = [_unless_missing(points_interval(delta.delta_ci))]
    if delta.bootstrap_ci is not None:
        lines.append(f"bootstrap {points_interval(delta.bootstrap_ci)}")
    if delta.look is not None and delta.planned_looks is not None:
        lines.append(f"look {delta.look} of {len(delta.planned_looks)}")
    return "\n".join(line for line in lines if line)


def _unless_missing(text: str) -> str:
    return "" if text == NOT_MEASURED else text


def slice_delta_table(bundle: ResultBundle) -> Table:
    """Slices down, variants across: the change in points, tinted, with its interval."""
    compared = [variant for variant in bundle.variants if variant != bundle.verdict.reference]
    deltas = {variant: bundle.verdict.variants[variant].quality for variant in compared}
    slices = sorted(
        {label for delta in deltas.values() if delta for label in delta.slices},
        key=lambda label: (worst_loss(deltas.values(), label), label),
    )
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
        "Change by slice, the worst loss first (pt; strong tint where it holds over all slices together)",
        [Column("Slice"), *columns],
        rows,
    )


def worst_loss(deltas: Iterable[QualityDelta | None], label: str) -> float:
    """The lowest change of a slice over the variants; 0 where none was measured."""
    found = [delta.slices[label].get("delta") for delta in deltas if delta and label in delta.slices]
    return min((change for change in found if change is not None), default=0.0)


def _items(deltas: dict[str, QualityDelta | None], label: str) -> str:
    sizes = {delta.slices[label].get("n") for delta in deltas.values() if delta and label in delta.slices}
    return " / ".join(f"{size:,} items" for size in sorted(size for size in sizes if size is not None))


def _slice_cell(delta: QualityDelta | None, label: str) -> Cell:
    found: dict[str, Any] = {} if delta is None else delta.slices.get(label, {})
    change = found.get("delta")
    if change is None:
        return Cell(NOT_MEASURED, "missing")
    corrected = found.get("p_holm")
    heat = max(-1.0, min(1.0, change / HEAT_FULL_SCALE))
    if corrected is None or delta is None or corrected > 1 - delta.confidence:
        heat *= NOISE_TINT
    note = _unless_missing(points_interval(found.get("delta_ci")))
    if corrected is not None:
        note += f"\np {probability(corrected)}"
    return figure(points(change), note=note, heat=heat)


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
