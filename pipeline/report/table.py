"""A table as plain data, so that HTML and Markdown show the same facts from one definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.report.wording import NOT_MEASURED

Kind = Literal["text", "sentence", "number", "name", "code", "decision", "missing"]


@dataclass(frozen=True)
class Cell:
    """One cell. `note` is small print below it, `tags` are labels beside it, `heat` (-1..1) tints it."""

    text: str
    kind: Kind = "text"
    note: str = ""
    tags: tuple[str, ...] = ()
    heat: float | None = None


@dataclass(frozen=True)
class Column:
    """One column's heading; `help` says what the figure is."""

    title: str
    help: str = ""
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """`rows` are as long as `columns`. `caption` says what the table is."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.caption!r}: a row has {len(row)} cells for {len(self.columns)} columns"
                )


def figure(text: str, note: str = "", tags: tuple[str, ...] = (), heat: float | None = None) -> Cell:
    """A numeric cell; the words for a missing number make it a missing cell."""
    if text == NOT_MEASURED:
        return Cell(text, "missing", note)
    return Cell(text, "number", note, tags, heat)


def name(text: str, note: str = "", tags: tuple[str, ...] = ()) -> Cell:
    """The row's heading."""
    return Cell(text, "name", note, tags)


def words(text: str | None, note: str = "", kind: Kind = "text") -> Cell:
    """A text cell; None or empty text is missing."""
    return Cell(text, kind, note) if text else Cell(NOT_MEASURED, "missing", note)
