"""Predicted against reported: which term of the budget is off, when the engine's pool isn't the planned one.

What the engine's log says of its memory is in GiB with two decimals, so a reported term is known to half of a hundredth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.capacity.budget import GIB, Card, Term

ROUNDING_BYTES = GIB // 200
"""Half of the last decimal that the log prints."""


COMPUTED = ("sampler", "experts")
"""Terms that no log names: sizes of tensors, inside the memory that it calls consumed, or, before 0.27, at the peak."""


@dataclass(frozen=True)
class Residual:
    """One term: planned with its band, reported or not, and whether it lies inside. Bytes."""

    term: Term
    reported: int | None
    note: str = ""

    @property
    def name(self) -> str:
        return self.term.name

    @property
    def within(self) -> bool | None:
        if self.reported is None:
            return None
        return self.term.low_bytes - ROUNDING_BYTES <= self.reported <= self.term.high_bytes + ROUNDING_BYTES

    @property
    def distance(self) -> int:
        """Bytes outside the band, 0 inside it."""
        if self.reported is None or self.within:
            return 0
        return max(self.term.low_bytes - self.reported, self.reported - self.term.high_bytes)


def planned_terms(card: Card, weight_bytes: int) -> list[Term]:
    """All terms of the budget, the weights first."""
    return [Term.exact("weights", weight_bytes), *card.overheads]


def reconcile(planned: Sequence[Term], memory_gib: Mapping[str, float]) -> list[Residual]:
    """The budget's terms, the weights first, beside what the log says of them (`serving.signals`' names, GiB).

    Versions differ in what they print: weights, memory outside PyTorch and the peak, or "consumed memory", which is all that stays
    (weights, the sampler's state, what is outside PyTorch), and the peak above it.
    """
    terms = {term.name: term for term in planned}
    weights = terms.pop("weights")
    buffers = terms.pop("buffers", None)
    loaded = weights if buffers is None else _sum("weights", weights, buffers)
    computed = [terms.pop(name) for name in COMPUTED if name in terms]
    inside = sum(term.value_bytes for term in computed)
    reported = _bytes(memory_gib, "model_loading_gib", "weights_gib")
    found = [Residual(loaded, reported, "checkpoint with its buffers")]
    consumed = _bytes(memory_gib, "consumed_gib")
    if (term := terms.pop("non_torch", None)) is not None:
        outside, note = _bytes(memory_gib, "non_torch_gib"), ""
        if outside is None and consumed is not None and reported is not None:
            outside = consumed - reported - inside
            note = f"consumed memory less the loaded model{_and(computed)}"
        found.append(Residual(term, outside, note))
    where = "in the consumed memory" if consumed is not None else "in the peak"
    for name, term in terms.items():
        size, note = _bytes(memory_gib, f"{name}_gib"), ""
        if name == "activation" and size is not None and computed and consumed is None:
            size, note = size - inside, f"the peak less{_and(computed).removeprefix(' and')}"
        found.append(Residual(term, size, note))
    found += [Residual(term, None, f"{where}, as computed") for term in computed]
    return found


def _bytes(memory_gib: Mapping[str, float], *names: str) -> int | None:
    found = next((memory_gib[name] for name in names if name in memory_gib), None)
    return None if found is None else round(found * GIB)


def _and(computed: Sequence[Term]) -> str:
    return "".join(f" and {term.name.replace('sampler', 'the sampler')}" for term in computed)


def _sum(name: str, exact: Term, more: Term) -> Term:
    """An exact term with one that has a band, whose driver and runs are the sum's."""
    return replace(
        more,
        name=name,
        value_bytes=exact.value_bytes + more.value_bytes,
        low_bytes=exact.low_bytes + more.low_bytes,
        high_bytes=exact.high_bytes + more.high_bytes,
    )


@dataclass(frozen=True)
class Mismatch:
    """Why the reported pool isn't the planned one. `settled`: the plan was sure of what is off, so something is wrong; else its
    band may be, which no run on this card has measured."""

    text: str
    settled: bool


POOL_TOLERANCE = 0.01
"""Relative: beside it the pool isn't what the reported memory makes. Blocks and the log's two decimals take less of a gibibyte."""


def explain_mismatch(
    predicted_tokens: int,
    band: tuple[int, int],
    reported_tokens: int,
    residuals: Sequence[Residual],
    budget_gib: tuple[float, float] | None = None,
) -> Mismatch | None:
    """Why the reported pool isn't the planned one; None where it lies within the band.

    `budget_gib`: the pool's memory, planned and reported; None where the log doesn't say. Where the tokens don't follow from it, kappa
    or the block size is off, and no band of memory excuses that.
    """
    low, high = band
    if low <= reported_tokens <= high:
        return None
    where = f"{predicted_tokens:,}" if low == high else f"{low:,} to {high:,}"
    text = f"the engine reports {reported_tokens:,} KV tokens where {where} were predicted"
    if budget_gib is not None and predicted_tokens and min(budget_gib) > 0:
        away = reported_tokens / predicted_tokens / (budget_gib[1] / budget_gib[0])
        if abs(away - 1) > POOL_TOLERANCE:
            return Mismatch(
                f"{text}, which its own {budget_gib[1]:.2f} GiB don't make: kappa or the block size is off",
                True,
            )
    off = sorted((one for one in residuals if one.distance), key=lambda one: -one.distance)
    uncertain = [one for one in residuals if not one.term.certain]
    if off:
        return Mismatch(f"{text}; off is {'; '.join(map(_off, off))}", all(one.term.certain for one in off))
    if not any(one.reported is not None for one in residuals):
        names = ", ".join(one.name for one in uncertain)
        why = (
            f"one of {names}, which nobody measured here"
            if uncertain
            else "kappa, the block size or the budget"
        )
        return Mismatch(f"{text}; its log says nothing of its memory terms, so off is {why}", not uncertain)
    if uncertain:
        names = ", ".join(one.name for one in uncertain)
        return Mismatch(f"{text}; each term that it logs is within its band, together {names} aren't", False)
    return Mismatch(
        f"{text}, though every memory term it logs is within its band: kappa or the block size is off", True
    )


def _off(one: Residual) -> str:
    assert one.reported is not None
    text = (
        f"{one.name}: {one.reported / GIB:.2f} GiB reported, {one.term.low_bytes / GIB:.2f} to "
        f"{one.term.high_bytes / GIB:.2f} GiB planned"
    )
    return text if one.term.certain else f"{text} (computed, not measured on this card)"
