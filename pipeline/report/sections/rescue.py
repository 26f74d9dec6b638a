"""What to try next: the ladder of every variant that is NO-GO on quality."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import count
from pipeline.results import Rung

COLUMNS = (
    Column("Try"),
    Column("Fit", "whole sequences of max_model_len, by the planner", numeric=True),
    Column("max_model_len", "tokens", numeric=True),
    Column("Here", "the profile's variant that does it, and its verdict; else what tries it"),
)


def section(bundle: ResultBundle) -> Section | None:
    """None where no variant needs one."""
    needing = {name: found.rescue for name, found in bundle.verdict.variants.items() if found.rescue}
    if not needing:
        return None
    needed = bundle.plan.required_sequences
    return Section(
        "rescue",
        "What to try next",
        [
            "For each variant that is NO-GO on quality, what is worth trying, in order: what costs no room first. The planner says "
            f"how many sequences each would hold; {needed} are needed. What device or engine can't do isn't listed.",
        ],
        [
            Table(f"After {variant}", COLUMNS, [_row(place, rung) for place, rung in enumerate(rungs, 1)])
            for variant, rungs in needing.items()
        ],
    )


def _row(place: int, rung: Rung) -> list[Cell]:
    enough = "" if rung.enough is None else "enough" if rung.enough else "too few"
    return [
        name(f"{place}. {rung.change}", note=rung.why),
        figure(count(rung.sequences), note=enough),
        figure(count(rung.max_model_len)),
        _here(rung),
    ]


def _here(rung: Rung) -> Cell:
    if rung.variant is not None:
        return words(rung.variant, note=rung.decision or "")
    if rung.command is None:
        return words("not by quantgate")
    return words(rung.command, kind="code") if rung.command.startswith("dvc ") else words(rung.command)
