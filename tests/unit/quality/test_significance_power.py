"""Exact tests against statsmodels, and the sample sizes against published figures and each other."""

from __future__ import annotations

import itertools

import pytest

from pipeline.quality.intervals import paired_score_interval
from pipeline.quality.power import items_to_decide, items_to_exclude_margin, smallest_margin
from pipeline.quality.significance import holm, mcnemar_exact, more_flips_exact, sign_flip_exact


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 3), (1, 7), (12, 2), (0, 5)])
def test_mcnemar_agrees_with_statsmodels(gained: int, lost: int) -> None:
    from statsmodels.stats.contingency_tables import mcnemar

    if gained + lost == 0:
        assert mcnemar_exact(gained, lost) == 1.0
        return
    assert mcnemar_exact(gained, lost) == pytest.approx(mcnemar([[9, gained], [lost, 9]], exact=True).pvalue)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 3), (1, 7), (12, 2), (0, 5)])
def test_sign_flips_of_single_items_are_mcnemars(gained: int, lost: int) -> None:
    differences = [1] * gained + [-1] * lost + [0] * 5
    alone = [str(index) for index in range(len(differences))]
    assert sign_flip_exact(differences, alone) == pytest.approx(mcnemar_exact(gained, lost))


def test_sign_flips_of_clusters_against_every_assignment() -> None:
    differences = [-1, -1, -1, 1, 0, -1, -1, 0, 1]
    clusters = ["a", "a", "a", "b", "b", "c", "c", "d", "d"]
    sums = (3, 1, 2, 1)
    totals = [abs(sum(s * m for s, m in zip(signs, sums))) for signs in itertools.product((1, -1), repeat=4)]
    expected = sum(total >= 3 for total in totals) / 16
    assert sign_flip_exact(differences, clusters) == pytest.approx(expected)
    assert sign_flip_exact(differences, clusters) > mcnemar_exact(2, 5)


def test_holm_agrees_with_statsmodels() -> None:
    from statsmodels.stats.multitest import multipletests

    found = {"a": 0.012, "b": 0.2, "c": 0.001, "d": 0.03, "e": 0.9, "f": 0.03}
    expected = multipletests(list(found.values()), method="holm")[1]
    assert holm(found) == pytest.approx(dict(zip(found, expected, strict=True)))
    assert holm({}) == {}


def test_more_flips_than_the_floor() -> None:
    assert more_flips_exact([False] * 9, [False] * 9) == 1.0
    assert more_flips_exact([True] * 6 + [False] * 3, [False] * 9) == pytest.approx(0.5**6)
    assert more_flips_exact([True] * 4 + [False] * 5, [True] * 4 + [False] * 5) == 1.0
    assert more_flips_exact([False] * 9, [True] * 3 + [False] * 6) == 1.0


@pytest.mark.parametrize(("margin", "expected"), [(0.01, 3092), (0.02, 773), (0.03, 344)])
def test_items_to_decide_known_values(margin: float, expected: int) -> None:
    """One-sided 5 %, 80 % power, 5 % flips: (1.6449 + 0.8416)² · 0.05 / margin², by hand."""
    assert items_to_decide(margin, 0.05, 0.05, 0.8) == expected


def test_items_to_decide_agrees_with_statsmodels() -> None:
    """A one-sided z test of a mean of standard deviation √flips that lies margin above its bound."""
    from statsmodels.stats.power import NormalIndPower

    solved = NormalIndPower(ddof=0).solve_power(
        effect_size=0.02 / 0.05**0.5, alpha=0.025, power=0.8, ratio=0, alternative="larger"
    )
    assert items_to_decide(0.02, 0.05, 0.025, 0.8) == pytest.approx(solved, abs=1)


def test_items_to_decide_without_flips_still_needs_the_score_intervals_minimum() -> None:
    n = items_to_decide(0.02, 0.0, 0.025, 0.8)
    assert paired_score_interval(0, 0, n, 0.95)[0] > -0.02
    assert paired_score_interval(0, 0, n - 2, 0.95)[0] < -0.02


@pytest.mark.parametrize("bad", [{"margin": 0.0}, {"alpha": 1.0}, {"power": 0.0}, {"flip_rate": 1.5}])
def test_items_to_decide_refuses_nonsense(bad: dict[str, float]) -> None:
    arguments = {"margin": 0.02, "flip_rate": 0.05, "alpha": 0.05, "power": 0.8} | bad
    with pytest.raises(ValueError):
        items_to_decide(**arguments)


@pytest.mark.parametrize("flips", [0.0, 0.01, 0.05, 0.15])
@pytest.mark.parametrize("n", [50, 200, 800])
def test_the_smallest_margin_inverts_the_number_of_items(n: int, flips: float) -> None:
    margin = smallest_margin(n, flips, 0.025, 0.8)
    assert margin is not None
    assert items_to_decide(margin + 1e-6, flips, 0.025, 0.8) in (n, n + 1)


def test_a_sample_too_small_for_any_margin() -> None:
    assert smallest_margin(1, 1.0, 0.025, 0.8) is None
    with pytest.raises(ValueError, match="no sample"):
        smallest_margin(0, 0.05, 0.025, 0.8)


def test_items_to_exclude_margin() -> None:
    assert items_to_exclude_margin(-0.01, 0.05, 0.02, 0.95) == 1921  # 1.959964² · 0.05 / 0.01² = 1920.73
    assert items_to_exclude_margin(-0.02, 0.05, 0.02, 0.95) is None
