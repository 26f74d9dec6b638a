"""Paired comparison of eval samples: what is counted, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.quality.sequential import plan_looks
from pipeline.quality.statistics import (
    compare,
    non_inferiority,
    pair,
    slice_scores,
)
from pipeline.results import Sample


def sample(index: int, correct: bool, **changes: Any) -> Sample:
    """Item `index`, answered right or wrong; one cluster each, two slices."""
    values: dict[str, Any] = {
        "id": f"item-{index:03}",
        "slice": "a" if index % 2 else "b",
        "cluster": f"c{index}",
        "doc_hash": f"d{index}",
        "prompt_hash": f"p{index}",
        "target_hash": f"t{index}",
        "correct": correct,
        "chosen": 0 if correct else 1,
        "target": 0,
        "loglikelihoods": [-1.0, -2.0, -3.0, -4.0],
    }
    return Sample(**(values | changes))


def run(answers: list[bool]) -> list[Sample]:
    return [sample(index, correct) for index, correct in enumerate(answers)]


def test_counts_both_directions() -> None:
    reference = run([True] * 60 + [False] * 40)
    variant = run([False] * 5 + [True] * 55 + [True] * 2 + [False] * 38)
    delta = compare(reference, variant, margin=0.02, confidence=0.95)
    assert (delta.n, delta.flips, delta.flips_lost, delta.flips_gained) == (100, 7, 5, 2)
    assert delta.delta == pytest.approx(-0.03)
    assert delta.accuracy == pytest.approx(0.57) and delta.reference_accuracy == pytest.approx(0.60)
    assert delta.delta_ci is not None and delta.delta_ci[0] < -0.03 < delta.delta_ci[1]
    assert delta.mcnemar_p == pytest.approx(58 / 128)  # 2 · P(X ≤ 2), X ~ B(7, ½) = 2 · 29 / 128
    assert delta.changed_answers == 7
    assert delta.noise_floor_flips is None


def test_slices_add_up() -> None:
    reference = run([True] * 60 + [False] * 40)
    variant = run([False] * 5 + [True] * 57 + [False] * 38)
    delta = compare(reference, variant, margin=0.02, confidence=0.95)
    assert sorted(delta.slices) == ["a", "b"]
    assert sum(s["n"] for s in delta.slices.values()) == 100
    assert sum(s["flips_lost"] for s in delta.slices.values()) == delta.flips_lost
    assert all(s["delta_ci"][0] <= s["delta"] <= s["delta_ci"][1] for s in delta.slices.values())


def test_a_changed_wrong_answer_is_no_flip_but_is_counted() -> None:
    reference = run([False] * 10)
    variant = [sample(i, False, chosen=2 if i == 3 else 1) for i in range(10)]
    delta = compare(reference, variant, margin=0.02, confidence=0.95)
    assert (delta.flips, delta.changed_answers) == (0, 1)


def test_identical_runs_cover_zero_with_a_width() -> None:
    answers = run([True, False] * 150)
    delta = compare(answers, answers, margin=0.02, confidence=0.95, control=answers)
    assert delta.delta == 0.0 and delta.flips == 0 and delta.mcnemar_p == 1.0
    assert delta.delta_ci is not None and delta.delta_ci[0] < 0.0 < delta.delta_ci[1]
    assert (delta.noise_floor_flips, delta.noise_floor_changed_answers) == (0, 0)
    assert delta.items_to_decide is None  # 300 items without a flip exclude a loss of 2 points


def test_noise_floor_comes_from_the_control() -> None:
    reference = run([True] * 50)
    control = [sample(i, i != 7) for i in range(50)]
    delta = compare(reference, reference, margin=0.02, confidence=0.95, control=control)
    assert (delta.noise_floor_flips, delta.noise_floor_changed_answers) == (1, 1)


def test_items_to_decide_exceeds_a_set_that_cant_tell() -> None:
    reference = run([True] * 50)
    delta = compare(reference, reference, margin=0.02, confidence=0.95)
    assert delta.items_to_decide is not None and delta.items_to_decide > 50


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((-0.019, 0.04), "GO"),
        ((-0.02, 0.04), "INCONCLUSIVE"),
        ((-0.05, 0.01), "INCONCLUSIVE"),
        ((-0.05, -0.02), "INCONCLUSIVE"),
        ((-0.05, -0.021), "NO-GO"),
        ((0.001, 0.05), "GO"),
        # significantly worse, and yet within the margin
        ((-0.015, -0.001), "GO"),
    ],
)
def test_non_inferiority(interval: tuple[float, float], expected: str) -> None:
    assert non_inferiority(interval, 0.02) == expected


@pytest.mark.parametrize(
    ("key", "word"), [("doc_hash", "documents"), ("prompt_hash", "prompts"), ("target_hash", "targets")]
)
def test_a_changed_hash_is_refused_by_item(key: str, word: str) -> None:
    reference = run([True] * 10)
    variant = [sample(i, True, **({key: "other"} if i == 4 else {})) for i in range(10)]
    with pytest.raises(UserInputError, match=rf"different {word}.*item-004"):
        compare(reference, variant, margin=0.02, confidence=0.95)


def test_differing_items_are_refused_by_name_on_either_side() -> None:
    ten = run([True] * 10)
    with pytest.raises(UserInputError, match=r"only the reference has item-009"):
        pair(ten, ten[:-1])
    with pytest.raises(UserInputError, match=r"only the variant has item-009"):
        pair(ten[:-1], ten)
    with pytest.raises(UserInputError, match=r"item-004 and 5 more"):
        pair(run([True] * 10), [sample(99, True)])


def test_duplicates_and_nothing_are_refused() -> None:
    ten = run([True] * 10)
    with pytest.raises(UserInputError, match=r"items twice: item-003"):
        pair([*ten, sample(3, True)], ten)
    with pytest.raises(UserInputError, match=r"variant has no eval samples"):
        pair(ten, [])


def test_a_control_over_other_items_is_refused() -> None:
    ten = run([True] * 10)
    with pytest.raises(UserInputError, match="different items"):
        compare(ten, ten, margin=0.02, confidence=0.95, control=ten[:5])


@pytest.mark.parametrize("margin", [0.0, -0.02, 1.0, 2.0])
def test_a_margin_in_points_is_refused(margin: float) -> None:
    ten = run([True] * 10)
    with pytest.raises(UserInputError, match="margin"):
        compare(ten, ten, margin=margin, confidence=0.95)


def test_slice_scores() -> None:
    scores = slice_scores(
        [*run([True, True, False, True]), sample(4, True, loglikelihoods=[-1.0, -2.0])], 0.95
    )
    assert list(scores) == ["a", "b"]
    assert (scores["b"].n, scores["a"].n) == (3, 2)
    assert scores["b"].accuracy == pytest.approx(2 / 3)
    assert scores["b"].chance == pytest.approx((0.25 + 0.25 + 0.5) / 3)
    assert scores["a"].ci[0] < scores["a"].accuracy <= scores["a"].ci[1]


def test_a_correction_for_the_number_of_slices() -> None:
    """Ten slices, one of which loses 6 of 10: 0.031 alone, 0.31 among ten."""
    reference = [sample(i, True, slice=f"s{i // 10}") for i in range(100)]
    variant = [sample(i, i >= 6, slice=f"s{i // 10}") for i in range(100)]
    slices = compare(reference, variant, margin=0.02, confidence=0.95).slices
    assert slices["s0"]["p"] == pytest.approx(2 * 0.5**6)
    assert slices["s0"]["p_holm"] == pytest.approx(20 * 0.5**6)
    assert slices["s1"]["p_holm"] == 1.0


def test_flips_that_dont_stand_out_from_the_control_are_noise() -> None:
    reference = run([True] * 100)
    noisy = [sample(i, i not in (3, 50, 77)) for i in range(100)]
    variant = [sample(i, i not in (3, 60, 61, 90)) for i in range(100)]
    delta = compare(reference, variant, margin=0.02, confidence=0.95, control=noisy)
    assert (delta.flips, delta.noise_floor_flips, delta.within_noise) == (4, 3, True)
    worse = [sample(i, i >= 20) for i in range(100)]
    assert compare(reference, worse, margin=0.02, confidence=0.95, control=noisy).within_noise is False


def test_flips_over_an_engine_that_repeats_itself_are_never_noise() -> None:
    reference = run([True] * 100)
    variant = [sample(i, i != 3) for i in range(100)]
    delta = compare(reference, variant, margin=0.02, confidence=0.95, control=reference)
    assert (delta.flips, delta.within_noise) == (1, False)
    moved = [sample(i, True, loglikelihoods=[-1.001, -2.0, -3.0, -4.0]) for i in range(100)]
    assert compare(reference, variant, margin=0.02, confidence=0.95, control=moved).within_noise is True
    assert compare(reference, variant, margin=0.02, confidence=0.95).within_noise is None


LOOKS = plan_looks(400, 4, 0.95, "pocock")


def test_a_sequential_run_that_stopped_early_is_compared_at_its_look() -> None:
    reference = run([True] * 400)
    early = compare(reference, reference[:200], margin=0.03, confidence=0.95, looks=LOOKS, control=reference)
    assert (early.n, early.look, early.planned_looks) == (200, 2, [100, 200, 300, 400])
    fixed = compare(reference[:200], reference[:200], margin=0.03, confidence=0.95)
    assert early.delta_ci is not None and fixed.delta_ci is not None
    assert early.delta_ci[0] < fixed.delta_ci[0]  # looking has its price
    assert compare(reference, reference, margin=0.03, confidence=0.95, looks=LOOKS).look == 4


def test_a_sequential_run_that_broke_off_is_refused() -> None:
    reference = run([True] * 400)
    with pytest.raises(UserInputError, match="150 items, which is none of the planned looks"):
        compare(reference, reference[:150], margin=0.03, confidence=0.95, looks=LOOKS)
    with pytest.raises(UserInputError, match="aren't the first of the reference's"):
        compare(reference, reference[100:300], margin=0.03, confidence=0.95, looks=LOOKS)
    with pytest.raises(UserInputError, match="planned over 400"):
        compare(reference[:200], reference[:200], margin=0.03, confidence=0.95, looks=LOOKS)


def test_the_smallest_margin_of_the_demos_control_is_under_its_margin() -> None:
    """400 items without a flip, 1.3 to a cluster: a GO at 3 points, with room."""
    control = [sample(i, True, cluster=f"c{i // 4 if i < 240 and i % 4 < 2 else i}") for i in range(400)]
    delta = compare(control, control, margin=0.03, confidence=0.95)
    assert delta.delta_ci is not None and delta.delta_ci[0] > -0.03
    assert delta.smallest_margin is not None and delta.smallest_margin < 0.03
    assert delta.bootstrap_ci == (0.0, 0.0)
