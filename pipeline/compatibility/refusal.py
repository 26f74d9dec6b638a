"""One thing that can't be done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """`what` is wrong, what to do instead, and who says so (file and version)."""

    what: str
    fix: str
    source: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix} ({self.source})"
