"""Predicted against reported: which term of the budget is off, when the engine's pool isn't the planned one.

What the engine's log says of its memory is in GiB with two decimals, so a reported term is known to half of a hundredth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.capacity.budget import GIB, Card, Term

ROUNDING_BYTES = GIB // 200
"""Half of the last decimal that the log prints."""


@dataclass(frozen=True)
class Residual:
    """One term: planned with its band, reported or not, and whether it lies inside. Bytes."""

    name: str
    predicted: int
    low: int
    high: int
    reported: int | None
    note: str = ""
    calibrated: bool = True
    """Whether the plan's figure is exact or was measured on this card."""

    @property
    def within(self) -> bool | None:
        if self.reported is None:
            return None
        return self.low - ROUNDING_BYTES <= self.reported <= self.high + ROUNDING_BYTES

    @property
    def distance(self) -> int:
        """Bytes outside the band, 0 inside it."""
        if self.reported is None or self.within:
            return 0
        return max(self.low - self.reported, self.reported - self.high)


def planned_terms(card: Card, weight_bytes: int) -> list[Term]:
    """All terms of the budget, the weights first."""
    return [Term.exact("weights", weight_bytes), *card.overheads]


def reconcile(planned: Sequence[Term], memory_gib: Mapping[str, float]) -> list[Residual]:
    """The budget's terms (see `planned_terms`) beside what the log says of them (`serving.signals`' names, GiB).

    Versions differ in what they print: weights alone, or "consumed memory", which is weights with what is outside PyTorch.
    """
    terms = {term.name: term for term in planned}
    weights = terms.pop("weights")
    buffers = terms.pop("buffers", Term.exact("buffers", 0))
    loaded = _sum("weights", weights, buffers)
    non_torch = terms.pop("non_torch", None)
    sampler = terms.pop("sampler", None)
    if non_torch is not None and sampler is not None:  # both are "consumed memory" beside the loaded model
        non_torch = _sum("non_torch", non_torch, sampler)
    found = []
    reported = memory_gib.get("model_loading_gib", memory_gib.get("weights_gib"))
    found.append(_residual(loaded, reported, "checkpoint with its buffers"))
    if non_torch is not None:
        reported = memory_gib.get("non_torch_gib")
        note = ""
        if reported is None and "consumed_gib" in memory_gib and found[0].reported is not None:
            reported = memory_gib["consumed_gib"] - found[0].reported / GIB
            note = "consumed memory less the loaded model"
        found.append(_residual(non_torch, reported, note))
    for name, term in terms.items():
        found.append(_residual(term, memory_gib.get(f"{name}_gib"), ""))
    return found


def _sum(name: str, *terms: Term) -> Term:
    return Term(
        name,
        sum(term.value_bytes for term in terms),
        sum(term.low_bytes for term in terms),
        sum(term.high_bytes for term in terms),
        calibrated=all(term.calibrated or term.is_exact for term in terms),
    )


def _residual(term: Term, reported_gib: float | None, note: str) -> Residual:
    reported = None if reported_gib is None else round(reported_gib * GIB)
    calibrated = term.calibrated or term.is_exact
    return Residual(term.name, term.value_bytes, term.low_bytes, term.high_bytes, reported, note, calibrated)


def explain_mismatch(
    predicted_tokens: int, band: tuple[int, int], reported_tokens: int, residuals: list[Residual]
) -> str | None:
    """Why the reported pool isn't the planned one; None where it lies within the band."""
    low, high = band
    if low <= reported_tokens <= high:
        return None
    where = f"{predicted_tokens:,}" if low == high else f"{low:,} to {high:,}"
    text = f"the engine reports {reported_tokens:,} KV tokens where {where} were predicted"
    worst = max(residuals, key=lambda residual: residual.distance, default=None)
    if worst is not None and worst.distance and worst.reported is not None:
        return (
            f"{text}; off is {worst.name}: {worst.reported / GIB:.2f} GiB reported, {worst.low / GIB:.2f} to "
            f"{worst.high / GIB:.2f} GiB planned"
        )
    if not any(residual.reported is not None for residual in residuals):
        return (
            f"{text}; its log says nothing of its memory terms, so kappa, the block size or the budget is off"
        )
    return f"{text}, though every memory term it logs is within its band: kappa or the block size is off"
