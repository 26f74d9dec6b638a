"""The quality gates: paired non-inferiority, never given for lack of evidence.

What can't be compared is INCONCLUSIVE with the reason, for the one variant that it is about: the others keep their verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.errors import UserInputError
from pipeline.quality.divergence import ScoredStream, diverge
from pipeline.quality.power import items_to_exclude_margin
from pipeline.quality.sequential import Looks, plan_looks
from pipeline.quality.statistics import compare, non_inferiority, perplexity_ratio
from pipeline.results import Divergence, Estimate, Gate, Quality, QualityDelta, Sample
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
    divergence: Divergence | None = None
    divergence_refusal: str | None = None
    further: Mapping[str, TaskEvidence] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskEvidence:
    """One further task: a delta where answers are right or wrong, a perplexity ratio where texts are measured."""

    margin: float
    delta: QualityDelta | None = None
    perplexity_ratio: Estimate | None = None
    refusal: str | None = None


def quality_evidence(
    name: str,
    reference: str,
    control: str | None,
    qualities: Mapping[str, Quality | None],
    streams: Mapping[str, ScoredStream | None],
    policy: Policy,
) -> Evidence:
    """The paired comparison with the reference (of the reference: with itself, all zero), and the divergence from it.

    Runs that aren't over the same items or tokens are refused by name; a control that can't be paired only takes the noise
    floor away.
    """
    paired = _paired(name, reference, control, qualities, policy)
    paired = replace(paired, further=_further(name, reference, control, qualities, policy))
    base, own = streams.get(reference), streams.get(name)
    if name == reference or base is None or own is None or not base.prompts:
        return paired
    try:
        return replace(paired, divergence=diverge(base, own, policy.confidence))
    except UserInputError as error:
        return replace(paired, divergence_refusal=str(error))


def _paired(
    name: str, reference: str, control: str | None, qualities: Mapping[str, Quality | None], policy: Policy
) -> Evidence:
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
    if base.batching != own.batching:
        return Evidence(
            True,
            refusal=f"{reference} was scored with batching {base.batching}, {name} with {own.batching}; run the stage quality again "
            "for both",
        )
    margin = policy.margin_of(base.task)
    try:
        floor = again.samples if again else None
        delta = _compared(base.samples, own.samples, floor, margin, policy, _looks(base, base.n, policy))
    except UserInputError as error:
        return Evidence(True, refusal=str(error))
    return Evidence(True, _as_reference(delta) if name == reference else delta)


def _further(
    name: str, reference: str, control: str | None, qualities: Mapping[str, Quality | None], policy: Policy
) -> dict[str, TaskEvidence]:
    """The set's further tasks, each compared on its own."""
    base, own = qualities.get(reference), qualities.get(name)
    again = None if control is None else qualities.get(control)
    if base is None or own is None:
        return {}
    found = {}
    for task, scores in base.further.items():
        margin, theirs = policy.margin_of(task), own.further.get(task)
        floor = again.further.get(task) if again else None
        try:
            if theirs is None:
                raise UserInputError(f"{name} wasn't scored on the task {task}")
            if scores.texts:
                ratio = perplexity_ratio(scores.texts, theirs.texts, policy.confidence)
                found[task] = TaskEvidence(margin, perplexity_ratio=ratio)
                continue
            again_samples = floor.samples if floor else None
            looks = _looks(base, scores.n, policy)
            delta = _compared(scores.samples, theirs.samples, again_samples, margin, policy, looks)
            found[task] = TaskEvidence(margin, _as_reference(delta) if name == reference else delta)
        except UserInputError as error:
            found[task] = TaskEvidence(margin, refusal=str(error))
    return found


def _looks(reference: Quality, items: int, policy: Policy) -> Looks | None:
    """When runs over `items` items of a task looked; None for a fixed sample."""
    if reference.looks == 1:
        return None
    return plan_looks(items, reference.looks, policy.confidence, reference.spending)


def _as_reference(delta: QualityDelta) -> QualityDelta:
    """The difference of a run to itself has no error: an interval would suggest that it was measured."""
    keys = ("delta_ci", "delta_se", "bootstrap_ci", "mcnemar_p", "items_to_decide", "smallest_margin")
    blank: dict[str, object] = dict.fromkeys((*keys, "noise_p", "within_noise"))
    return delta.model_copy(update={**blank, "slices": {}})


def _compared(
    base: Sequence[Sample],
    own: Sequence[Sample],
    again: Sequence[Sample] | None,
    margin: float,
    policy: Policy,
    looks: Looks | None = None,
) -> QualityDelta:
    """The comparison; without the noise floor where only the control can't be paired."""
    try:
        return compare(base, own, margin=margin, confidence=policy.confidence, control=again, looks=looks)
    except UserInputError:
        if again is None:
            raise
        return _compared(base, own, None, margin, policy, looks)


def quality_gates(
    evidence: Evidence, floor: Evidence | None, policy: Policy, *, is_reference: bool
) -> list[Gate]:
    """Every quality gate of one variant; `floor` is the A/A control's evidence."""
    margin = evidence.delta.margin if evidence.delta else policy.quality_margin
    if is_reference:
        gates = [reference_quality_gate(evidence.measured, margin)]
        return gates + [reference_quality_gate(True, t.margin, f"quality-{k}") for k, t in _gated(evidence)]
    control = None if floor is None else floor.delta
    return [
        quality_gate(evidence.delta, control, margin, evidence.refusal),
        *(_task_gate(task, found, floor) for task, found in _gated(evidence)),
        *divergence_gates(evidence, policy),
    ]


def _gated(evidence: Evidence) -> list[tuple[str, TaskEvidence]]:
    """Further tasks that say right or wrong: a perplexity has no margin in points, it is shown."""
    return [(task, found) for task, found in evidence.further.items() if found.perplexity_ratio is None]


def _task_gate(task: str, found: TaskEvidence, floor: Evidence | None) -> Gate:
    control = floor.further.get(task) if floor else None
    return quality_gate(
        found.delta, control.delta if control else None, found.margin, found.refusal, f"quality-{task}"
    )


def divergence_gates(evidence: Evidence, policy: Policy) -> list[Gate]:
    """The gates that the policy asks for, each on the whole confidence interval, as the accuracy's."""
    found = evidence.divergence
    asked: tuple[tuple[str, float | None, str, Estimate | None, int], ...] = (
        ("divergence-kl", policy.max_kl, "nats", found.kl if found else None, 1),
        ("divergence-top1", policy.min_same_top1, "share of tokens", found.same_top1 if found else None, -1),
        (
            "divergence-perplexity",
            policy.max_perplexity_ratio,
            "x",
            found.perplexity_ratio if found else None,
            1,
        ),
        (
            "divergence-delta-p",
            policy.max_delta_p_rms,
            "share of probability",
            found.delta_p_rms if found else None,
            1,
        ),
    )
    return [
        _limit_gate(Rule(name, limit, unit), estimate, worse, evidence.divergence_refusal)
        for name, limit, unit, estimate, worse in asked
        if limit is not None
    ]


def _limit_gate(rule: Rule, found: Estimate | None, worse: int, refusal: str | None) -> Gate:
    """GO if the interval is on the good side of the limit, NO-GO if it is on the bad one. `worse` 1: higher is worse."""
    if found is None or found.ci is None or rule.limit is None:
        return rule.cannot_run(refusal or "divergence was not measured on this variant or on the reference")
    low, high = found.ci
    said = f"{found.value:.4g} [{low:.4g}, {high:.4g}]"
    best, worst = (low, high) if worse > 0 else (high, low)
    if worse * (worst - rule.limit) < 0:
        return rule.says("GO", found.value, f"{said} is on the good side of {rule.limit:g}")
    if worse * (best - rule.limit) > 0:
        return rule.says("NO-GO", found.value, f"{said} is on the bad side of {rule.limit:g}")
    return rule.cannot_run(f"{said} is on both sides of {rule.limit:g}", found.value)


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
