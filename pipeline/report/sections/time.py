"""Where the time went, stage by stage."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name
from pipeline.report.times import phase_text, stage_rows
from pipeline.report.wording import count


def section(bundle: ResultBundle) -> Section | None:
    """None where no stage left its time."""
    rows = stage_rows(bundle)
    if not rows:
        return None
    table = Table(
        "Seconds by stage",
        [Column("Stage"), Column("Seconds", numeric=True), Column("Of it")],
        [
            [
                name(row.stage, tags=("from an earlier run",) if row.kept else ()),
                figure(count(row.seconds)),
                Cell(phase_text(row)),
            ]
            for row in rows
        ],
    )
    intro = "Each stage's own clock, read at the end of each phase. Where DVC kept a stage's results, its time is that of the run that made them."
    return Section("time", "Where the time went", [intro], [table])
