"""The quality gates: paired non-inferiority, never given for lack of evidence.

What can't be compared is INCONCLUSIVE with the reason, for the one variant that it is about: the others keep their verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import UserInputError
from pipeline.quality.power import items_to_exclude_margin
from pipeline.quality.sequential import Looks, plan_looks
from pipeline.quality.statistics import compare, non_inferiority
from pipeline.results import Gate, Quality, QualityDelta, Sample
from pipeline.verdict.policy import Policy
from pipeline.verdict.rule import Rule

# A/A p-value below which the two reference runs count as different systems, not as noise. 0.01 rather than 0.05: there is
# one such look per run, and a false alarm takes the decision from every variant.
CONTROL_ALARM_P = 0.01


@dataclass(frozen=True)
class Evidence:
    """What is known of one variant's quality. `refusal` says why it can't be compared though both sides were measured."""

    measured: bool
    delta: QualityDelta | None = None
    refusal: str | None = None


def quality_evidence(
    name: str, reference: str, control: str | None, qualities: Mapping[str, Quality | None], policy: Policy
) -> Evidence:
    """The paired comparison with the reference (of the reference: with itself, all zero).

    Runs that aren't over the same items are refused by name; a control that can't be paired only takes the noise floor away.
    """
    base, own = qualities.get(reference), qualities.get(name)
    again = None if control is None else qualities.get(control)
    if base is None or own is None:
        return Evidence(own is not None)
    if base.evalset_sha256 != own.evalset_sha256 or base.sample_seed != own.sample_seed:
        return Evidence(
            True,
            refusal=f"the eval set or its sample changed between the runs of {reference} and {name}; run the stage "
            "quality again for both",
        )
    try:
        delta = _compared(base, own.samples, None if again is None else again.samples, policy)
    except UserInputError as error:
        return Evidence(True, refusal=str(error))
    if name == reference:
        # The difference of a run to itself has no error: an interval would suggest that it was measured.
        blank = dict.fromkeys(
            ("delta_ci", "delta_se", "bootstrap_ci", "mcnemar_p", "items_to_decide", "smallest_margin")
        )
        delta = delta.model_copy(update={**blank, "noise_p": None, "within_noise": None, "slices": {}})
    return Evidence(True, delta)


def _compared(
    base: Quality, own: Sequence[Sample], again: Sequence[Sample] | None, policy: Policy
) -> QualityDelta:
    looks: Looks | None = None
    if base.looks > 1:
        looks = plan_looks(base.n, base.looks, policy.confidence, base.spending)
    try:
        return compare(
            base.samples,
            own,
            margin=policy.quality_margin,
            confidence=policy.confidence,
            control=again,
            looks=looks,
        )
    except UserInputError:
        if again is None:
            raise
        return _compared(base, own, None, policy)


def quality_gates(
    evidence: Evidence, floor: Evidence | None, policy: Policy, *, is_reference: bool
) -> list[Gate]:
    """Every quality gate of one variant; `floor` is the A/A control's evidence."""
    if is_reference:
        return [reference_quality_gate(evidence.measured, policy.quality_margin)]
    control = None if floor is None else floor.delta
    return [quality_gate(evidence.delta, control, policy.quality_margin, evidence.refusal)]


def quality_gate(
    delta: QualityDelta | None,
    control: QualityDelta | None,
    margin: float,
    refusal: str | None = None,
    name: str = "quality",
) -> Gate:
    """Non-inferiority on paired items: is the whole interval of variant − reference above −margin?

    `control` is the A/A comparison. Where the reference differs from itself beyond chance, deltas mean nothing and the
    gate is INCONCLUSIVE; so it is with a `refusal`, the reason why the two runs can't be compared, and where the items
    couldn't have shown a loss.
    """
    rule = Rule(name, -margin, "accuracy")
    if refusal is not None:
        return rule.cannot_run(refusal)
    if delta is None or delta.delta is None or delta.delta_ci is None or delta.n is None:
        return rule.cannot_run("quality was not measured on this variant or on the reference")
    low, high = delta.delta_ci
    found = (
        f"{_points(delta.delta)} points [{_points(low)}, {_points(high)}] on {delta.n} items{_look(delta)}"
    )
    if control is not None and control.mcnemar_p is not None and control.mcnemar_p < CONTROL_ALARM_P:
        noise = f"the reference differs from its own second run ({control.flips} flips, p = {control.mcnemar_p:.2g})"
        return rule.cannot_run(f"{noise}, so no delta can be trusted; here {found}", delta.delta)
    if delta.untold is not None:
        return rule.cannot_run(f"{delta.untold}; here {found}", delta.delta)
    limit = f"{margin * 100:g} points"
    decision = non_inferiority((low, high), margin)
    if decision == "GO":
        return rule.says("GO", delta.delta, f"{found}: a loss of {limit} or more is excluded")
    if decision == "NO-GO":
        return rule.says("NO-GO", delta.delta, f"{found}: the loss is more than {limit}")
    return rule.cannot_run(
        f"{found}: a loss of {limit} is neither excluded nor shown; {_needed(delta)}", delta.delta
    )


def _look(delta: QualityDelta) -> str:
    """Where a sequential run stopped."""
    if delta.look is None or delta.planned_looks is None:
        return ""
    return f" (look {delta.look} of {len(delta.planned_looks)})"


def _needed(delta: QualityDelta) -> str:
    """What would decide it: the size planned for a true difference of 0, or for the observed one where that was reached."""
    if delta.items_to_decide is None or delta.n is None or delta.delta is None:
        return "the items that would decide it are not known"
    if delta.items_to_decide > delta.n:
        return f"about {delta.items_to_decide} items would decide it if there is no true loss"
    enough = f"{delta.items_to_decide} items would have decided it were there no true loss"
    if not delta.delta_se:
        return enough
    more = items_to_exclude_margin(delta.delta, delta.n * delta.delta_se**2, delta.margin, delta.confidence)
    return f"{enough}; at the observed one about {more} would" if more and more > delta.n else enough


def reference_quality_gate(measured: bool, margin: float, name: str = "quality") -> Gate:
    """The reference against itself: 0 by definition, if it was measured at all (without it no variant has a delta)."""
    rule = Rule(name, -margin, "accuracy")
    if not measured:
        return rule.cannot_run("quality was not measured")
    return rule.says("GO", 0.0, "the variants are compared with this one: its own delta is 0 by definition")


def _points(value: float) -> str:
    return f"{value * 100 + 0.0:+.1f}"
