"""The intervals against published values, an independent solution of the same problem, statsmodels, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from pipeline.quality.intervals import (
    clustered_se,
    design_effect,
    items_to_decide,
    mcnemar_exact,
    normal_interval,
    paired_interval,
    paired_score_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("counts", "confidence", "expected", "digits"),
    [
        # Fagerland, Lydersen, Laake (2014), Stat. Med. 33:2850-2875, airway hyper-responsiveness (Bentur 2009), Tango's interval
        ((1, 7, 21), 0.95, (-0.517, -0.026), 3),
        # R, PropCIs::scoreci.mp(60, 20, 1000), as published by its users
        ((20, 60, 1000), 0.95, (-0.0584, -0.0231), 4),
        # R, PropCIs::scoreci.mp(25, 28, 618, 0.90)
        ((28, 25, 618), 0.90, (-0.0148, 0.0247), 4),
        # R, PropCIs::scoreci.mp(41, 48, 549, 0.90)
        ((48, 41, 549), 0.90, (-0.0157, 0.0414), 4),
    ],
)
def test_tango_published_values(
    counts: tuple[int, int, int], confidence: float, expected: tuple[float, float], digits: int
) -> None:
    low, high = paired_score_interval(*counts, confidence)
    assert (round(low, digits), round(high, digits)) == expected


@pytest.mark.parametrize(("gained", "lost", "n"), [(3, 9, 60), (0, 4, 120), (12, 12, 200), (7, 0, 35)])
def test_tango_inverts_the_score_test_found_numerically(gained: int, lost: int, n: int) -> None:
    """At each bound the score statistic, its nuisance parameter maximised by search instead of by formula, is ±1.96."""

    def statistic(delta: float) -> float:
        def negative_log_likelihood(lost_rate: float) -> float:
            rates = (lost_rate + delta, lost_rate, 1 - 2 * lost_rate - delta)
            counts = (gained, lost, n - gained - lost)
            return -sum(c * math.log(max(r, 1e-300)) for c, r in zip(counts, rates, strict=True) if c)

        best = optimize.minimize_scalar(
            negative_log_likelihood,
            bounds=(max(0.0, -delta), (1 - delta) / 2),
            method="bounded",
            options={"xatol": 1e-12},
        )
        return (gained - lost - n * delta) / math.sqrt(n * (2 * best.x + delta - delta**2))

    low, high = paired_score_interval(gained, lost, n, 0.95)
    assert statistic(low) == pytest.approx(1.959964, abs=1e-3)
    assert statistic(high) == pytest.approx(-1.959964, abs=1e-3)


def test_tango_with_no_flips_has_the_closed_form_width() -> None:
    z2 = 1.959963985**2
    low, high = paired_score_interval(0, 0, 200, 0.95)
    assert high == pytest.approx(z2 / (200 + z2), abs=1e-8)
    assert low == pytest.approx(-high, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.data())
def test_tango_properties(n: int, data: st.DataObject) -> None:
    """It brackets the estimate, stays in −1..1, mirrors with the direction and widens with confidence."""
    gained = data.draw(st.integers(0, n))
    lost = data.draw(st.integers(0, n - gained))
    low, high = paired_score_interval(gained, lost, n, 0.95)
    assert -1.0 <= low <= (gained - lost) / n <= high <= 1.0
    assert low < high
    mirrored = paired_score_interval(lost, gained, n, 0.95)
    assert mirrored == pytest.approx((-high, -low), abs=1e-6)
    wide = paired_score_interval(gained, lost, n, 0.99)
    assert wide[0] <= low + 1e-9 and wide[1] >= high - 1e-9


@pytest.mark.parametrize("counts", [(-1, 0, 10), (6, 6, 10), (0, 0, 0)])
def test_tango_refuses_impossible_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        paired_score_interval(*counts, 0.95)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (81, 263), (1, 40), (150, 300)])
@pytest.mark.parametrize("confidence", [0.90, 0.95, 0.99])
def test_wilson_agrees_with_statsmodels(successes: int, n: int, confidence: float) -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    expected = proportion.proportion_confint(successes, n, alpha=1 - confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx(expected, abs=1e-9)


def test_wilson_published_value() -> None:
    """Newcombe (1998), Stat. Med. 17:857-872, table I: 81 of 263, method 3."""
    low, high = wilson_interval(81, 263, 0.95)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 3), (1, 7), (12, 2), (0, 5)])
def test_mcnemar_agrees_with_statsmodels(gained: int, lost: int) -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    if gained + lost == 0:
        assert mcnemar_exact(gained, lost) == 1.0
        return
    assert mcnemar_exact(gained, lost) == pytest.approx(
        tables.mcnemar([[9, gained], [lost, 9]], exact=True).pvalue
    )


@pytest.mark.parametrize(("margin", "expected"), [(0.01, 3092), (0.02, 773), (0.03, 344)])
def test_items_to_decide_known_values(margin: float, expected: int) -> None:
    """One-sided 5 %, 80 % power, 5 % flips: (1.6449 + 0.8416)² · 0.05 / margin², by hand."""
    assert items_to_decide(margin, 0.05, 0.05, 0.8) == expected


def test_items_to_decide_without_flips_still_needs_the_score_intervals_minimum() -> None:
    n = items_to_decide(0.02, 0.0, 0.025, 0.8)
    assert paired_score_interval(0, 0, n, 0.95)[0] > -0.02
    assert paired_score_interval(0, 0, n - 2, 0.95)[0] < -0.02


@pytest.mark.parametrize("bad", [{"margin": 0.0}, {"alpha": 1.0}, {"power": 0.0}, {"flip_rate": 1.5}])
def test_items_to_decide_refuses_nonsense(bad: dict[str, float]) -> None:
    arguments = {"margin": 0.02, "flip_rate": 0.05, "alpha": 0.05, "power": 0.8} | bad
    with pytest.raises(ValueError):
        items_to_decide(**arguments)


def test_clustered_se_without_clusters_is_the_usual_one() -> None:
    differences = [1, 0, 0, -1, 0, 0, 1, 0, 0, 0]
    usual = np.std(differences, ddof=1) / math.sqrt(len(differences))
    assert clustered_se(differences, [str(i) for i in range(10)]) == pytest.approx(usual)


def test_clustered_se_agrees_with_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(3)
    clusters = rng.integers(0, 12, 90)
    differences = rng.choice([-1, 0, 1], 90, p=[0.1, 0.8, 0.1])
    fit = api.OLS(differences, np.ones(90)).fit(cov_type="cluster", cov_kwds={"groups": clusters})
    # statsmodels also multiplies by (n − 1) / (n − 1) here: one regressor, so the factors are the same
    assert clustered_se(differences.tolist(), [str(c) for c in clusters]) == pytest.approx(
        fit.bse[0], rel=1e-6
    )


def test_clustered_se_of_one_cluster_is_unknown() -> None:
    assert clustered_se([1, 0, 0], ["a", "a", "a"]) is None


def test_copying_every_item_doesnt_narrow_the_interval() -> None:
    """Three copies of each item in one cluster carry the information of one."""
    differences = [1] * 3 + [-1] * 8 + [0] * 89
    clusters = [str(i) for i in range(100)]
    once = paired_interval(differences, clusters, 0.95)
    thrice = paired_interval(differences * 3, clusters * 3, 0.95)
    assert thrice == pytest.approx(once, rel=0.02)
    ignoring = paired_interval(differences * 3, [str(i) for i in range(300)], 0.95)
    assert ignoring[1] - ignoring[0] < 0.7 * (once[1] - once[0])


def test_no_flips_count_a_cluster_as_one_item() -> None:
    clusters = [str(i // 3) for i in range(300)]
    assert design_effect([0] * 300, clusters) == pytest.approx(3.0)
    assert paired_interval([0] * 300, clusters, 0.95) == pytest.approx(paired_score_interval(0, 0, 100, 0.95))


# --- simulation -----------------------------------------------------------------------------------------------


def _simulated_intervals(
    n: int, gained_rate: float, lost_rate: float, repeats: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the 95 % interval in `repeats` experiments with independent items."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, [gained_rate, lost_rate, 1 - gained_rate - lost_rate], size=repeats)
    known: dict[tuple[int, int], tuple[float, float]] = {}
    for gained, lost, _ in counts:
        if (gained, lost) not in known:  # few distinct outcomes, many repeats
            known[gained, lost] = paired_score_interval(gained, lost, n, 0.95)
    bounds = np.array([known[gained, lost] for gained, lost, _ in counts])
    return bounds[:, 0], bounds[:, 1]


@pytest.mark.parametrize(
    ("gained_rate", "lost_rate"), [(0.025, 0.025), (0.015, 0.035), (0.001, 0.05), (0.0, 0.02), (0.1, 0.1)]
)
def test_coverage_at_200_items(gained_rate: float, lost_rate: float) -> None:
    low, high = _simulated_intervals(200, gained_rate, lost_rate, 20_000, seed=11)
    truth = gained_rate - lost_rate
    covered = float(np.mean((low <= truth) & (truth <= high)))
    assert 0.93 <= covered <= 0.99


@pytest.mark.parametrize("n", [200, 400])
@pytest.mark.parametrize(("margin", "flips"), [(0.02, 0.05), (0.03, 0.05), (0.05, 0.05), (0.03, 0.15)])
def test_false_go_at_the_margin(n: int, margin: float, flips: float) -> None:
    """A variant that is exactly the margin worse: GO in at most 5 % of experiments (2.5 % nominal)."""
    low, _ = _simulated_intervals(n, (flips - margin) / 2, (flips + margin) / 2, 20_000, seed=12)
    assert float(np.mean(low > -margin)) <= 0.05


def test_the_normal_interval_would_give_false_gos() -> None:
    """Why the score interval: with all flips lost and few of them, estimate − 1.96 SE is too optimistic."""
    rng = np.random.default_rng(13)
    n, margin = 200, 0.02
    false_gos = 0
    for lost in rng.binomial(n, margin, size=20_000):
        se = math.sqrt(lost / n - (lost / n) ** 2) / math.sqrt(n)
        false_gos += normal_interval(-lost / n, se, 0.95)[0] > -margin
    assert false_gos / 20_000 > 0.05
    low, _ = _simulated_intervals(n, 0.0, margin, 20_000, seed=13)
    assert float(np.mean(low > -margin)) <= 0.05


def test_clusters_that_flip_as_one() -> None:
    """100 passages of three items that flip together: the interval covers, and ignoring clusters gives false GOs."""
    rng = np.random.default_rng(14)
    clusters = [str(i // 3) for i in range(300)]
    alone = [str(i) for i in range(300)]
    margin, repeats = 0.02, 1500
    covered = false_go = naive_false_go = 0
    for _ in range(repeats):
        differences = np.repeat(rng.choice([-1, 0, 1], 100, p=[0.03, 0.96, 0.01]), 3).tolist()
        low, high = paired_interval(differences, clusters, 0.95)
        covered += low <= -margin <= high
        false_go += low > -margin
        naive_false_go += paired_interval(differences, alone, 0.95)[0] > -margin
    assert covered / repeats >= 0.93
    assert false_go / repeats <= 0.05
    assert naive_false_go / repeats > 0.05
