"""Paired comparison of two runs over the same eval items: the numbers behind the quality gate.

Unpaired accuracies need thousands of items to tell a point apart; the same items asked twice need hundreds, because
only the flips carry noise. So everything here refuses to compare what isn't the same item, prompt and target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.errors import UserInputError
from pipeline.quality.intervals import (
    bootstrap_interval,
    clustered_se,
    design_effect,
    paired_interval,
    two_sided_z,
    wilson_interval,
)
from pipeline.quality.power import items_to_decide, smallest_margin
from pipeline.quality.sequential import Looks, confidence_at
from pipeline.quality.significance import holm, mcnemar_exact, more_flips_exact, sign_flip_exact
from pipeline.results import Decision, Estimate, QualityDelta, RollingText, Sample, SliceScore

POWER = 0.8  # of the sample-size figure; the field's usual choice
NAMED_ITEMS = 5  # items a refusal names before it only counts
# One-sided p above which a flip rate counts as the noise floor's. It decides a word in the report and never a gate.
NOISE_P = 0.05


def slice_scores(samples: Sequence[Sample], confidence: float) -> dict[str, SliceScore]:
    """Accuracy per slice with its Wilson interval and the accuracy of guessing, in order of the slices' names."""
    scores = {}
    for name in sorted({sample.slice for sample in samples}):
        members = [sample for sample in samples if sample.slice == name]
        right = sum(sample.correct for sample in members)
        scores[name] = SliceScore(
            n=len(members),
            accuracy=right / len(members),
            ci=wilson_interval(right, len(members), confidence),
            chance=_chance(members),
        )
    return scores


def non_inferiority(delta_ci: tuple[float, float], margin: float) -> Decision:
    """GO if the whole interval is above −margin, NO-GO if it is all below, else INCONCLUSIVE."""
    low, high = delta_ci
    if low > -margin:
        return "GO"
    return "NO-GO" if high < -margin else "INCONCLUSIVE"


def pair(reference: Sequence[Sample], variant: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Both runs' samples of each item, in the reference's order.

    `UserInputError`, naming items, where an id is there twice, the id sets differ, or a hash of document, prompt or target does.
    """
    sides = {"reference": reference, "variant": variant}
    by_id: dict[str, dict[str, Sample]] = {}
    for side, samples in sides.items():
        by_id[side] = {sample.id: sample for sample in samples}
        if not samples:
            raise UserInputError(f"the {side} has no eval samples to compare")
        if len(by_id[side]) != len(samples):
            ids = [sample.id for sample in samples]
            raise UserInputError(
                f"the {side} has items twice: {_named(sorted({i for i in ids if ids.count(i) > 1}))}"
            )
    for side, other in (("reference", "variant"), ("variant", "reference")):
        missing = sorted(by_id[side].keys() - by_id[other].keys())
        if missing:
            raise UserInputError(
                f"runs over different items can't be compared: only the {side} has {_named(missing)}"
            )
    for key, what in (("doc_hash", "documents"), ("prompt_hash", "prompts"), ("target_hash", "targets")):
        changed = [s.id for s in reference if getattr(s, key) != getattr(by_id["variant"][s.id], key)]
        if changed:
            raise UserInputError(
                f"runs over different {what} can't be compared: {_named(changed)} changed between the reference's run "
                "and the variant's; run the stage quality again for both"
            )
    for side, samples in sides.items():
        odd = [sample.id for sample in samples if not all(map(math.isfinite, sample.loglikelihoods))]
        if odd:
            raise UserInputError(f"the {side} has scores that are no numbers: {_named(odd)}")
    return [(sample, by_id["variant"][sample.id]) for sample in reference]


def compare(
    reference: Sequence[Sample],
    variant: Sequence[Sample],
    *,
    margin: float,
    confidence: float,
    control: Sequence[Sample] | None = None,
    looks: Looks | None = None,
) -> QualityDelta:
    """Variant minus reference on paired items, with the interval that decides and all that explains it.

    `margin` is the accuracy that may be lost (0.02 = 2 points), `confidence` the two-sided level of `delta_ci`: at 0.95 a
    variant that is exactly the margin worse becomes a GO at most about 2.5 % of the time. `control` is the reference run again;
    its flips are the noise floor. With `looks` the variant may hold just the items up to a look, in the reference's order, and
    the interval is that look's. Errors: see `pair` and `look_of`.
    """
    if not 0.0 < margin < 1.0:
        raise UserInputError(
            f"quality margin {margin}: allowed are values between 0 and 1, such as 0.02 for 2 points"
        )
    pairs, look, level = _at_look(reference, variant, confidence, looks)
    differences = _differences(pairs)
    clusters = [first.cluster for first, _ in pairs]
    n, gained, lost = len(pairs), differences.count(1), differences.count(-1)
    right = sum(second.correct for _, second in pairs)
    interval = paired_interval(differences, clusters, level)
    effect = design_effect(differences, clusters)
    alpha, flip_rate = (1 - level) / 2, max(gained + lost, 0.5) / n  # half a flip where none was seen
    needed = None
    if non_inferiority(interval, margin) == "INCONCLUSIVE":
        needed = math.ceil(items_to_decide(margin, flip_rate, alpha, POWER) * effect)
    floor: dict[str, Any] = {} if control is None else _noise(pairs, control)
    return QualityDelta(
        n=n,
        accuracy=right / n,
        accuracy_ci=wilson_interval(right, n, confidence),
        reference_accuracy=sum(first.correct for first, _ in pairs) / n,
        reference_chance=_chance([first for first, _ in pairs]),
        delta=(gained - lost) / n,
        delta_ci=interval,
        delta_se=clustered_se(differences, clusters),
        bootstrap_ci=bootstrap_interval(differences, clusters, confidence),
        design_effect=effect,
        confidence=confidence,
        margin=margin,
        flips=gained + lost,
        flips_lost=lost,
        flips_gained=gained,
        changed_answers=_changed_answers(pairs),
        mcnemar_p=mcnemar_exact(gained, lost),
        items_to_decide=needed,
        smallest_margin=smallest_margin(n / effect, flip_rate, alpha, POWER),
        noise_floor_flips=floor.get("flips"),
        noise_floor_changed_answers=floor.get("changed_answers"),
        noise_p=floor.get("p"),
        within_noise=floor.get("within"),
        untold=_why_untold(pairs, confidence),
        look=look,
        planned_looks=None if looks is None else list(looks.items),
        slices=_slice_deltas(pairs, confidence),
    )


def _at_look(
    reference: Sequence[Sample], variant: Sequence[Sample], confidence: float, looks: Looks | None
) -> tuple[list[tuple[Sample, Sample]], int | None, float]:
    """The pairs, the look that they were stopped at, and the two-sided level of the interval there."""
    look, level = None, confidence
    if looks is not None:
        look = look_of(reference, variant, looks)
        reference = reference[: looks.items[look - 1]]
        level = confidence_at(looks, look)
    pairs = pair(reference, variant)
    if len(pairs) < 2:
        raise UserInputError(
            "one item is no comparison; at least 2 are needed, and hundreds to decide anything"
        )
    return pairs, look, level


def perplexity_ratio(
    reference: Sequence[RollingText], variant: Sequence[RollingText], confidence: float
) -> Estimate:
    """Variant's byte perplexity over the reference's, on the same texts: exp(Σ(ll_ref − ll_var) / Σbytes).

    The standard error is the ratio estimator's, with texts of one source together (Cochran 1977, Sampling Techniques, section
    6.4), carried through the exponential by the delta method. `UserInputError` where the texts differ.
    """
    theirs = {text.id: text for text in variant}
    changed = [t.id for t in reference if t.id not in theirs or theirs[t.id].doc_hash != t.doc_hash]
    if changed or len(theirs) != len(reference) or not reference:
        raise UserInputError(
            f"runs over different texts can't be compared: {_named(changed) or 'the numbers differ'}"
        )
    losses = [text.loglikelihood - theirs[text.id].loglikelihood for text in reference]
    if not all(map(math.isfinite, losses)):
        raise UserInputError("a text's likelihood is no number, so nothing can be compared")
    total = sum(text.utf8_bytes for text in reference)
    log = math.fsum(losses) / total
    residuals = [loss - log * text.utf8_bytes for loss, text in zip(losses, reference, strict=True)]
    spread = clustered_se(residuals, [text.cluster for text in reference])
    value = math.exp(log)
    if spread is None:
        return Estimate(value=value, se=None, ci=None)
    se = spread * len(reference) / total
    half = two_sided_z(confidence) * se
    return Estimate(value=value, se=value * se, ci=(math.exp(log - half), math.exp(log + half)))


def look_of(reference: Sequence[Sample], variant: Sequence[Sample], looks: Looks) -> int:
    """At which look (from 1) a sequential run stopped: it holds exactly the reference's first items up to that look.

    `UserInputError` for any other number or order of items: a run that broke off anywhere else wasn't stopped by the rule.
    """
    if len(reference) != looks.items[-1]:
        raise UserInputError(
            f"the reference holds {len(reference)} items where the looks are planned over {looks.items[-1]}; "
            "run the stage quality again for both"
        )
    if len(variant) not in looks.items:
        raise UserInputError(
            f"the variant holds {len(variant)} items, which is none of the planned looks "
            f"({', '.join(str(count) for count in looks.items)}): its run broke off or was planned otherwise"
        )
    if [sample.id for sample in variant] != [sample.id for sample in reference[: len(variant)]]:
        raise UserInputError("the variant's items aren't the first of the reference's, in the same order")
    return looks.items.index(len(variant)) + 1


def _noise(pairs: Sequence[tuple[Sample, Sample]], control: Sequence[Sample]) -> dict[str, Any]:
    """The A/A floor over the same items, and whether the variant's flips stand out from it.

    Where reference and control gave every choice the very same score, the engine repeats itself exactly: the floor is 0 and
    every flip is the variant's own, however few there are.
    """
    wanted = {first.id for first, _ in pairs}
    floor = pair([first for first, _ in pairs], [sample for sample in control if sample.id in wanted])
    flips = sum(1 for difference in _differences(floor) if difference)
    own = [difference != 0 for difference in _differences(pairs)]
    p = more_flips_exact(own, [difference != 0 for difference in _differences(floor)])
    repeats = all(_same_answer(first, second) for first, second in floor)
    within = not any(own) or (p > NOISE_P and not repeats)
    return {"flips": flips, "changed_answers": _changed_answers(floor), "p": p, "within": within}


def _same_answer(first: Sample, second: Sample) -> bool:
    return all(
        getattr(first, key) == getattr(second, key) for key in ("chosen", "generated", "loglikelihoods")
    )


def _why_untold(pairs: Sequence[tuple[Sample, Sample]], confidence: float) -> str | None:
    """Why no loss could show on these items, or None. A GO would then say something about the set, not the variant."""
    n, right = len(pairs), sum(first.correct for first, _ in pairs)
    if right in (0, n) and right == sum(second.correct for _, second in pairs):
        kind = "right" if right else "wrong"
        return f"reference and variant are {kind} on all {n} items: a set that scores everything alike can't tell models apart"
    chance = _chance([first for first, _ in pairs])
    if wilson_interval(right, n, confidence)[0] <= chance:
        return (
            f"the reference is right on {right} of {n} items, which isn't above guessing ({chance:.0%}): "
            "there is no ability that a variant could lose"
        )
    return None


def flipped(reference: Sequence[Sample], variant: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Both answers of each item whose correctness changed: the losses first, then by slice and id. A sequential run's items only."""
    kept = {sample.id for sample in variant}
    pairs = pair([sample for sample in reference if sample.id in kept], variant)
    found = [(first, second) for first, second in pairs if first.correct != second.correct]
    return sorted(found, key=lambda both: (both[1].correct, both[0].slice, both[0].id))


def _chance(samples: Sequence[Sample]) -> float:
    """Accuracy of guessing: one in the number of choices, 0 for an answer that is generated."""
    return math.fsum(1 / len(s.loglikelihoods) for s in samples if s.loglikelihoods) / len(samples)


def _differences(pairs: Sequence[tuple[Sample, Sample]]) -> list[int]:
    """+1 where only the second is right, −1 where only the first is, else 0."""
    return [int(second.correct) - int(first.correct) for first, second in pairs]


def _changed_answers(pairs: Sequence[tuple[Sample, Sample]]) -> int:
    return sum(1 for a, b in pairs if (a.chosen, a.generated) != (b.chosen, b.generated))


def _slice_deltas(pairs: Sequence[tuple[Sample, Sample]], confidence: float) -> dict[str, dict[str, Any]]:
    """Per slice what `compare` gives for the whole. Shown, never gated: six slices would make six chances to fail.

    `p` is the exact test within the slice, `p_holm` the same held over all slices together.
    """
    deltas: dict[str, dict[str, Any]] = {}
    for name in sorted({first.slice for first, _ in pairs}):
        members = [(first, second) for first, second in pairs if first.slice == name]
        differences = _differences(members)
        clusters = [first.cluster for first, _ in members]
        deltas[name] = {
            "n": len(members),
            "accuracy": sum(second.correct for _, second in members) / len(members),
            "reference_accuracy": sum(first.correct for first, _ in members) / len(members),
            "delta": sum(differences) / len(members),
            "delta_ci": list(paired_interval(differences, clusters, confidence)),
            "flips_lost": differences.count(-1),
            "flips_gained": differences.count(1),
            "changed_answers": _changed_answers(members),
            "p": sign_flip_exact(differences, clusters),
        }
    adjusted = holm({name: found["p"] for name, found in deltas.items()})
    return {name: {**found, "p_holm": adjusted[name]} for name, found in deltas.items()}


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:NAMED_ITEMS])
    rest = len(ids) - NAMED_ITEMS
    return f"{shown} and {rest} more" if rest > 0 else shown
