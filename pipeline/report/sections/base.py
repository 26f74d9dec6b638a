"""What a section is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.report.table import Table


@dataclass(frozen=True)
class Section:
    """`key` is the anchor and the key of its plots; `definitions` are (word, meaning) pairs."""

    key: str
    title: str
    intro: Sequence[str]
    tables: Sequence[Table] = field(default_factory=tuple)
    definitions: Sequence[tuple[str, str]] = field(default_factory=tuple)
