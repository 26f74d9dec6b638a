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
    clustered_se,
    design_effect,
    items_to_decide,
    mcnemar_exact,
    paired_interval,
    two_sided_z,
    wilson_interval,
)
from pipeline.results import Decision, QualityDelta, Sample, SliceScore

POWER = 0.8  # of the sample-size figure; the field's usual choice
NAMED_ITEMS = 5  # items a refusal names before it only counts


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
            chance=math.fsum(1 / len(sample.loglikelihoods) for sample in members) / len(members),
        )
    return scores


def non_inferiority(delta_ci: tuple[float, float], margin: float) -> Decision:
    """GO if the whole interval is above −margin, NO-GO if it is all below, else INCONCLUSIVE."""
    low, high = delta_ci
    if low > -margin:
        return "GO"
    return "NO-GO" if high < -margin else "INCONCLUSIVE"


def items_to_exclude_margin(delta: float, variance: float, margin: float, confidence: float) -> int | None:
    """Items after which the interval around the observed delta would clear −margin on either side; None at the margin.

    `variance` is that of one item's difference (design effect included). n = z² · variance / (delta + margin)².
    """
    distance = abs(delta + margin)
    if distance < 1e-9:
        return None
    return math.ceil(two_sided_z(confidence) ** 2 * variance / distance**2)


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
    return [(sample, by_id["variant"][sample.id]) for sample in reference]


def compare(
    reference: Sequence[Sample],
    variant: Sequence[Sample],
    *,
    margin: float,
    confidence: float,
    control: Sequence[Sample] | None = None,
) -> QualityDelta:
    """Variant minus reference on paired items, with the interval that decides and all that explains it.

    `margin` is the accuracy that may be lost (0.02 = 2 points), `confidence` the two-sided level of `delta_ci`: at 0.95 a
    variant that is exactly the margin worse becomes a GO at most about 2.5 % of the time. `control` is the reference run again;
    its flips are the noise floor. Errors: see `pair`.
    """
    if not 0.0 < margin < 1.0:
        raise UserInputError(
            f"quality margin {margin}: allowed are values between 0 and 1, such as 0.02 for 2 points"
        )
    pairs = pair(reference, variant)
    differences = _differences(pairs)
    clusters = [first.cluster for first, _ in pairs]
    n = len(pairs)
    gained, lost = differences.count(1), differences.count(-1)
    right = sum(second.correct for _, second in pairs)
    interval = paired_interval(differences, clusters, confidence)
    decided = non_inferiority(interval, margin) != "INCONCLUSIVE"
    noise = None if control is None else pair(reference, control)
    return QualityDelta(
        n=n,
        accuracy=right / n,
        accuracy_ci=wilson_interval(right, n, confidence),
        reference_accuracy=sum(first.correct for first, _ in pairs) / n,
        delta=(gained - lost) / n,
        delta_ci=interval,
        delta_se=clustered_se(differences, clusters),
        confidence=confidence,
        margin=margin,
        flips=gained + lost,
        flips_lost=lost,
        flips_gained=gained,
        changed_answers=_changed_answers(pairs),
        mcnemar_p=mcnemar_exact(gained, lost),
        items_to_decide=None if decided else _items_needed(differences, clusters, margin, confidence),
        noise_floor_flips=None if noise is None else sum(1 for d in _differences(noise) if d),
        noise_floor_changed_answers=None if noise is None else _changed_answers(noise),
        slices=_slice_deltas(pairs, confidence),
    )


def _items_needed(
    differences: Sequence[int], clusters: Sequence[str], margin: float, confidence: float
) -> int:
    """`items_to_decide` at the observed flip rate, times what clusters cost. Half a flip is added where none was seen."""
    n = len(differences)
    flip_rate = max(sum(1 for d in differences if d), 0.5) / n
    base = items_to_decide(margin, flip_rate, (1 - confidence) / 2, POWER)
    return math.ceil(base * design_effect(differences, clusters))


def _differences(pairs: Sequence[tuple[Sample, Sample]]) -> list[int]:
    """+1 where only the second is right, −1 where only the first is, else 0."""
    return [int(second.correct) - int(first.correct) for first, second in pairs]


def _changed_answers(pairs: Sequence[tuple[Sample, Sample]]) -> int:
    return sum(1 for first, second in pairs if first.chosen != second.chosen)


def _slice_deltas(pairs: Sequence[tuple[Sample, Sample]], confidence: float) -> dict[str, dict[str, Any]]:
    """Per slice what `compare` gives for the whole. Shown, never gated: six slices would make six chances to fail."""
    deltas = {}
    for name in sorted({first.slice for first, _ in pairs}):
        members = [(first, second) for first, second in pairs if first.slice == name]
        differences = _differences(members)
        interval = paired_interval(differences, [first.cluster for first, _ in members], confidence)
        deltas[name] = {
            "n": len(members),
            "accuracy": sum(second.correct for _, second in members) / len(members),
            "reference_accuracy": sum(first.correct for first, _ in members) / len(members),
            "delta": sum(differences) / len(members),
            "delta_ci": list(interval),
            "flips_lost": differences.count(-1),
            "flips_gained": differences.count(1),
            "changed_answers": _changed_answers(members),
        }
    return deltas


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:NAMED_ITEMS])
    rest = len(ids) - NAMED_ITEMS
    return f"{shown} and {rest} more" if rest > 0 else shown
