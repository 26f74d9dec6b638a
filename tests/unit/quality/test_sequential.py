"""Alpha spending: bounds against published tables, error and cost of looking by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.quality.intervals import (
    effective_counts,
    paired_score_interval,
    score_statistic,
    two_sided_z,
)
from pipeline.quality.sequential import Looks, confidence_at, critical_values, plan_looks, spent
from tests.support.flips import sequential_runs


@pytest.mark.parametrize(
    ("spending", "expected"),
    [
        # Five equal looks, two-sided 5 %, as published with the LanDeMets program (Reboussin et al. 2000, Control. Clin. Trials 21:190-207)
        ("obrien-fleming", (4.8769, 3.3569, 2.6803, 2.2898, 2.0310)),
        ("pocock", (2.4380, 2.4268, 2.4101, 2.3966, 2.3859)),
    ],
)
def test_bounds_of_five_looks_are_the_published_ones(spending: str, expected: tuple[float, ...]) -> None:
    bounds = critical_values(Looks((100, 200, 300, 400, 500), 0.025, spending))  # type: ignore[arg-type]
    assert bounds == pytest.approx(expected, abs=2e-3)


def test_one_look_is_the_fixed_test() -> None:
    plan = plan_looks(400, 1, 0.95, "pocock")
    assert plan.items == (400,)
    assert critical_values(plan) == pytest.approx((two_sided_z(0.95),), abs=1e-6)
    assert confidence_at(plan, 1) == pytest.approx(0.95, abs=1e-6)


@pytest.mark.parametrize("spending", ["pocock", "obrien-fleming"])
def test_all_of_alpha_is_spent_at_the_end(spending: str) -> None:
    fractions = [0.1, 0.3, 0.7, 1.0]
    budget = [spent(fraction, 0.025, spending) for fraction in fractions]  # type: ignore[arg-type]
    assert budget == sorted(budget) and budget[-1] == pytest.approx(0.025)


def test_a_look_decides_exactly_as_its_interval_does() -> None:
    """The repeated interval at a look clears the margin just when the score statistic passes the look's bound."""
    plan = plan_looks(800, 8, 0.95, "pocock")
    for look, lost in ((3, 0), (3, 4), (8, 9), (8, 14)):
        n = plan.items[look - 1]
        low, _ = paired_score_interval(0, lost, n, confidence_at(plan, look))
        fixed, _ = paired_score_interval(0, lost, n, 0.95)
        assert low < fixed


@pytest.mark.parametrize("n", [200, 400, 800])
@pytest.mark.parametrize(
    ("margin", "flips"), [(0.02, 0.02), (0.02, 0.05), (0.03, 0.03), (0.03, 0.05), (0.03, 0.15)]
)
def test_false_go_at_the_margin_is_held_over_all_looks(n: int, margin: float, flips: float) -> None:
    runs = sequential_runs(n, 8, flips, -margin, margin)
    assert runs.go <= 0.05
    assert (
        runs.go <= 0.025 + 3 * (0.025 * 0.975 / 10_000) ** 0.5 + 0.004
    )  # near the nominal 2.5 %, discreteness included


def test_false_no_go_of_a_variant_at_the_margin_is_held_too() -> None:
    assert sequential_runs(800, 8, 0.05, -0.03, 0.03).no_go <= 0.05


def test_looking_with_the_fixed_bound_would_break_the_promise() -> None:
    assert sequential_runs(800, 8, 0.15, -0.03, 0.03, bounds=False).go > 0.05


def test_false_go_is_held_where_clusters_flip_together() -> None:
    """200 passages of three items that flip as one, in random order, four looks: the design effect is estimated at each."""
    rng = np.random.default_rng(21)
    plan = plan_looks(600, 4, 0.95, "pocock")
    margin, repeats = 0.03, 400
    false_gos = 0
    for _ in range(repeats):
        found = np.repeat(rng.choice([-1, 0, 1], 200, p=[0.04, 0.95, 0.01]), 3)
        order = rng.permutation(600)
        counts = [
            effective_counts(found[order[:n]].tolist(), [str(i // 3) for i in order[:n]]) for n in plan.items
        ]
        gained, lost, n = np.array(counts).T
        score = score_statistic(gained, lost, n, np.array(-margin))
        stopped = np.flatnonzero(np.abs(score) > critical_values(plan))
        false_gos += bool(len(stopped)) and score[stopped[0]] > 0
    assert false_gos / repeats <= 0.05


def test_a_sound_variant_is_decided_on_60_percent_of_the_items() -> None:
    """No true loss, 5 % flips, margin 3 points, the whole of a set of 800 items or more."""
    runs = sequential_runs(1000, 10, 0.05, 0.0, 0.03)
    assert runs.items_share <= 0.60
    assert runs.go >= 0.9


@pytest.mark.parametrize("items", [(), (0, 10), (20, 10), (10, 10)])
def test_looks_that_dont_rise_are_refused(items: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        Looks(items, 0.025, "pocock")


def test_a_set_with_fewer_items_than_looks_has_a_look_an_item() -> None:
    assert plan_looks(3, 8, 0.95, "pocock").items == (1, 2, 3)


@pytest.mark.parametrize(("items", "looks"), [(400, 0), (0, 8)])
def test_no_looks_and_no_items_are_refused(items: int, looks: int) -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        plan_looks(items, looks, 0.95, "pocock")
