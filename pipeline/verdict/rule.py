"""A gate's fixed part, and how it answers."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.results import Decision, Gate


@dataclass(frozen=True)
class Rule:
    """Name, threshold and unit of one gate. `limit` is None where the rule has no number."""

    name: str
    limit: float | None
    unit: str

    def says(self, decision: Decision, value: float | None, why: str) -> Gate:
        """The gate's answer; `value` is None where nothing was measured."""
        return Gate(
            name=self.name,
            decision=decision,
            value=None if value is None else float(value),
            limit=None if self.limit is None else float(self.limit),
            unit=self.unit,
            why=why,
        )

    def cannot_run(self, why: str, value: float | None = None) -> Gate:
        """INCONCLUSIVE: a gate that could not run is never a GO."""
        return self.says("INCONCLUSIVE", value, why)
