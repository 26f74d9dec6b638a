"""Where a variant went another way than the reference: the flipped items, with prompt, both answers and both scores."""

from __future__ import annotations

from pipeline.quality.statistics import flipped
from pipeline.report.bundle import ResultBundle
from pipeline.report.table import Cell, Column, Table, name, words
from pipeline.report.wording import number
from pipeline.results import Sample

SHOWN_FLIPS = 40
"""Flipped items shown per variant; all of them are in MLflow's table and in the result files."""
SHOWN_CHARS = 220
"""Of a prompt: its end, where the question is."""


def flip_tables(bundle: ResultBundle) -> list[Table]:
    """Where each variant went another way than the reference: prompt, both answers, both scores; the losses first."""
    tables = []
    base = bundle.qualities.get(bundle.verdict.reference)
    for variant in bundle.variants:
        own, delta = bundle.qualities.get(variant), bundle.verdict.variants[variant].quality
        # Without a delta the runs could not be paired: then there is no such thing as a flip.
        if base is None or own is None or delta is None or variant == bundle.verdict.reference:
            continue
        found = flipped(base.samples, own.samples)
        if not found:
            continue
        more = f" (the first {SHOWN_FLIPS} of {len(found)})" if len(found) > SHOWN_FLIPS else ""
        rows = [_flip_row(first, second) for first, second in found[:SHOWN_FLIPS]]
        tables.append(
            Table(
                f"Items that {variant} answers differently{more}",
                [
                    Column("Item"),
                    Column("Prompt", "its end"),
                    Column("Right answer"),
                    Column(
                        "Reference", "its answer, and the right choice's lead over the best wrong one in nats"
                    ),
                    Column(
                        variant, "its answer, and the right choice's lead over the best wrong one in nats"
                    ),
                ],
                rows,
            )
        )
    return tables


def _flip_row(first: Sample, second: Sample) -> list[Cell]:
    end = first.prompt[-SHOWN_CHARS:]
    return [
        name(first.id, note=f"{first.slice}, {'gained' if second.correct else 'lost'}"),
        words(("…" if len(first.prompt) > SHOWN_CHARS else "") + end if end.strip() else None),
        words(_quoted(first.expected)),
        _answer_cell(first),
        _answer_cell(second),
    ]


def _answer_cell(sample: Sample) -> Cell:
    shown = "right" if sample.correct else "wrong"
    lead = score_lead(sample)
    if lead is not None:
        shown += f", {number(lead)} nats"
    if sample.cut:
        shown += ", cut"
    return words(_quoted(sample.answer), note=shown)


def score_lead(sample: Sample) -> float | None:
    """Loglikelihood of the right choice minus the best wrong one's: above 0 where the answer is right. None if generated."""
    if sample.target is None or len(sample.loglikelihoods) < 2:
        return None
    right = sample.loglikelihoods[sample.target]
    return right - max(v for place, v in enumerate(sample.loglikelihoods) if place != sample.target)


def _quoted(text: str | None) -> str | None:
    return None if text is None else f"“{text.strip()}”"
