"""The decision: one row per variant with the figures that decide, then every gate."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import control_summary, fitting_sequences, is_emulated, required_sequences, why
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import (
    NOT_MEASURED,
    count,
    gate_number,
    number,
    percent,
    points,
    points_interval,
    sentence,
    speed,
)
from pipeline.results import Gate, QualityDelta, VariantVerdict, Verdict


def section(bundle: ResultBundle) -> Section:
    """The verdict table and the gates."""
    return Section(
        "verdict",
        "Verdict",
        [
            f"Reference: {bundle.verdict.reference}. {control_summary(bundle.verdict)} "
            "A variant is GO only if every one of its gates is."
        ],
        [summary_table(bundle), gate_matrix(bundle)],
    )


def gates_section(bundle: ResultBundle) -> Section:
    """Every gate with its reason: long, so it comes after the evidence."""
    return Section(
        "gates",
        "Gates in detail",
        [
            "One rule each, with what was found, the limit, and the reason. A gate marked “not gated” is no part of the verdict."
        ],
        [gates_table(bundle)],
    )


def gate_matrix(bundle: ResultBundle) -> Table:
    """Gates down, variants across: the decision and the figure behind it."""
    gates = {
        name: {gate.name: gate for gate in bundle.verdict.variants[name].gates} for name in bundle.variants
    }
    names = list(dict.fromkeys(gate for own in gates.values() for gate in own))
    rows = []
    for gate_name in names:
        found = [gates[variant].get(gate_name) for variant in bundle.variants]
        limits = {gate_number(gate.limit, gate.unit) for gate in found if gate and gate.limit is not None}
        note = f"limit {' / '.join(sorted(limits))}" if limits else ""
        rows.append([name(gate_name, note=note), *[_gate_cell(gate) for gate in found]])
    return Table("Gates", [Column("Gate"), *[Column(variant) for variant in bundle.variants]], rows)


def _gate_cell(gate: Gate | None) -> Cell:
    if gate is None:
        return Cell("no such gate", "missing")
    return Cell(gate.decision, "decision", gate_number(gate.value, gate.unit), _not_gated(gate))


def _not_gated(gate: Gate) -> tuple[str, ...]:
    return () if gate.gating else ("not gated",)


def summary_table(bundle: ResultBundle) -> Table:
    """One row per variant: decision, capacity against the need, quality delta, throughput, why."""
    verdict = bundle.verdict
    needed = required_sequences(verdict) or bundle.plan.required_sequences
    rows = []
    for variant in bundle.variants:
        result = verdict.variants[variant]
        rows.append(
            [
                name(variant, note=str(bundle.facts.get("variants", {}).get(variant, ""))),
                Cell(result.decision, "decision"),
                figure(count(fitting_sequences(result.capacity)), note=f"{needed:,} needed"),
                delta_cell(verdict, variant),
                speed_cell(result),
                words(why(result), kind="sentence"),
            ]
        )
    return Table(
        "Verdict by variant",
        [
            Column("Variant"),
            Column("Verdict"),
            Column(
                "Sequences that fit", "whole sequences of max_model_len tokens in the engine's KV pool", True
            ),
            Column("Accuracy change", "against the reference, in points, with its confidence interval", True),
            Column(
                "Peak output tok/s", "highest over the load levels; × is the ratio to the reference", True
            ),
            Column("Why"),
        ],
        rows,
    )


def delta_cell(verdict: Verdict, variant: str) -> Cell:
    """The paired delta, its interval, its flips and, beside them, the control's flips."""
    if variant == verdict.reference:
        return Cell("reference", "text")
    delta = verdict.variants[variant].quality
    if delta is None or delta.delta is None:
        return Cell(NOT_MEASURED, "missing")
    lines = [points_interval(delta.delta_ci), flips_text(delta)]
    divergence = verdict.variants[variant].divergence
    if divergence is not None:
        lines.append(f"KL {number(divergence.kl.value, 4)}, same token {percent(divergence.same_top1.value)}")
    if delta.items_to_decide is not None:
        lines.append(f"{count(delta.items_to_decide)} items needed")
    return figure(f"{points(delta.delta)} pt", note="\n".join(lines))


def flips_text(delta: QualityDelta) -> str:
    """`flips 23, A/A 0`, and that they are noise where they don't stand out from the control's."""
    noise = ": noise" if delta.within_noise and delta.flips else ""
    return f"flips {count(delta.flips)}, A/A {count(delta.noise_floor_flips)}{noise}"


def speed_cell(result: VariantVerdict) -> Cell:
    """Peak output throughput, its ratio to the reference, and whether a kernel was emulated."""
    throughput = result.throughput
    if throughput is None or throughput.peak_output_tok_s is None:
        return Cell(NOT_MEASURED, "missing")
    parts = []
    if throughput.ratio_to_reference is not None:
        parts.append(f"× {number(throughput.ratio_to_reference)}")
    if throughput.at_concurrency is not None:
        parts.append(f"at {throughput.at_concurrency} streams")
    return figure(
        speed(throughput.peak_output_tok_s),
        note=", ".join(parts),
        tags=("emulated kernel",) if is_emulated(result) else (),
    )


def gates_table(bundle: ResultBundle) -> Table:
    """Every gate of every variant with what was found, the limit and the reason."""
    rows = []
    for variant in bundle.variants:
        for index, gate in enumerate(bundle.verdict.variants[variant].gates):
            limit = "none" if gate.limit is None else gate_number(gate.limit, gate.unit)
            rows.append(
                [
                    name(variant if index == 0 else ""),
                    Cell(gate.name, "text"),
                    Cell(gate.decision, "decision", tags=_not_gated(gate)),
                    figure(gate_number(gate.value, gate.unit)),
                    figure(limit),
                    words(sentence(gate.why), kind="sentence"),
                ]
            )
    return Table(
        "Gates in detail",
        [
            Column("Variant"),
            Column("Gate"),
            Column("Decision"),
            Column("Found", numeric=True),
            Column("Limit", numeric=True),
            Column("Reason"),
        ],
        rows,
    )
