"""The intervals against published values, an independent solution of the same problem, statsmodels, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pipeline.quality.intervals import (
    bootstrap_interval,
    clustered_se,
    design_effect,
    effective_counts,
    normal_interval,
    paired_interval,
    paired_score_bounds,
    paired_score_interval,
    wilson_interval,
)
from tests.support.flips import coverage, false_go_rate


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


@settings(max_examples=200)
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


def test_bootstrap_agrees_with_scipy_and_knows_clusters() -> None:
    """SciPy's percentile bootstrap where items are independent; whole clusters drawn where they aren't."""
    rng = np.random.default_rng(5)
    differences = rng.choice([-1, 0, 1], 400, p=[0.06, 0.9, 0.04])
    alone = [str(index) for index in range(400)]
    expected = stats.bootstrap(
        (differences,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(6)
    ).confidence_interval
    ours = bootstrap_interval(differences.tolist(), alone, 0.95, resamples=4000)
    assert ours == pytest.approx(tuple(expected), abs=1.01 / 400)  # one item: the mean moves in steps
    copied = bootstrap_interval(np.repeat(differences, 3).tolist(), np.repeat(alone, 3).tolist(), 0.95, 4000)
    assert ours is not None and copied is not None
    assert copied[1] - copied[0] == pytest.approx(ours[1] - ours[0], rel=0.05)
    assert bootstrap_interval([1, 0, 0], ["a", "a", "a"], 0.95) is None


def test_bounds_of_many_are_those_of_each() -> None:
    gained, lost = np.array([0.0, 3.0, 40.0]), np.array([2.0, 3.0, 1.0])
    low, high = paired_score_bounds(gained, lost, np.array([60.0, 200.0, 41.0]), np.array(1.959964))
    for index, n in enumerate((60, 200, 41)):
        alone = paired_score_interval(gained[index], lost[index], n, 0.95)
        assert (low[index], high[index]) == pytest.approx(alone, abs=1e-6)


# --- what the interval promises, counted over all outcomes ----------------------------------------------------

FLIP_RATES = (0.02, 0.05, 0.10, 0.15)
LOST_SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
"""Share of the flips that are losses: from no difference to all lost. The mirror images give the same."""


@pytest.mark.parametrize("n", [50, 200, 800])
@pytest.mark.parametrize("flips", FLIP_RATES)
def test_the_95_percent_interval_covers(n: int, flips: float) -> None:
    """93 to 97 % at every share of losses, wherever some interval could: with under 4 flips expected none can (next test)."""
    covered = [coverage(n, flips, share) for share in LOST_SHARES]
    assert min(covered) >= 0.93
    if n * flips >= 4:
        assert max(covered) <= 0.971  # one cell of 60 is at 97.03 %: 50 items, 10 % flips, all of them lost
    else:
        assert n == 50 and max(covered) <= 0.9995


@pytest.mark.parametrize("flips", [0.02, 0.05])
def test_no_symmetric_interval_could_cover_93_to_97_percent_of_the_time_at_so_few_flips(flips: float) -> None:
    """At 50 items and no true difference |gained − lost| takes few values: its distribution jumps over the whole band."""
    rng = np.random.default_rng(1)
    counts = rng.multinomial(50, [flips / 2, flips / 2, 1 - flips], size=200_000)
    apart = np.abs(counts[:, 0] - counts[:, 1])
    reachable = [float(np.mean(apart <= limit)) for limit in range(6)]
    assert not any(0.93 <= level <= 0.97 for level in reachable), reachable


@pytest.mark.parametrize("n", [50, 200, 400, 800])
@pytest.mark.parametrize(
    ("margin", "flips"),
    [(0.02, 0.02), (0.02, 0.05), (0.03, 0.03), (0.03, 0.05), (0.03, 0.15), (0.05, 0.05), (0.05, 0.15)],
)
def test_false_go_at_the_margin(n: int, margin: float, flips: float) -> None:
    """A variant that is exactly the margin worse: GO with at most 5 % probability (2.5 % nominal)."""
    assert false_go_rate(n, flips, margin) <= 0.05


def test_the_normal_interval_would_give_false_gos() -> None:
    """Why the score interval: with all flips lost and few of them, estimate − 1.96 SE is too optimistic."""
    rng = np.random.default_rng(13)
    n, margin = 200, 0.02
    false_gos = 0
    for lost in rng.binomial(n, margin, size=20_000):
        se = math.sqrt(lost / n - (lost / n) ** 2) / math.sqrt(n)
        false_gos += normal_interval(-lost / n, se, 0.95)[0] > -margin
    assert false_gos / 20_000 > 0.05
    assert false_go_rate(n, margin, margin) <= 0.05


# --- clusters, by simulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1.0, 0.4])
def test_clusters_that_flip_together(together: float) -> None:
    """100 passages of three items: the interval covers and holds the error; ignoring the clusters gives false GOs.

    `together` is the chance that an item does what its passage does instead of flipping on its own.
    """
    rng = np.random.default_rng(14)
    clusters = [str(i // 3) for i in range(300)]
    margin, repeats, rates = 0.02, 1500, [0.03, 0.96, 0.01]
    passages = np.repeat(rng.choice([-1, 0, 1], (repeats, 100), p=rates), 3, axis=1)
    items = rng.choice([-1, 0, 1], (repeats, 300), p=rates)
    found = np.where(rng.random((repeats, 300)) < together, passages, items)
    counts = np.array([effective_counts(row.tolist(), clusters) for row in found])
    low, high = paired_score_bounds(counts[:, 0], counts[:, 1], counts[:, 2], np.array(1.959964))
    assert np.mean((low <= -margin) & (-margin <= high)) >= 0.93
    assert np.mean(low > -margin) <= 0.05
    if together == 1.0:
        gained, lost = (found > 0).sum(axis=1), (found < 0).sum(axis=1)
        naive, _ = paired_score_bounds(gained, lost, np.array(300.0), np.array(1.959964))
        assert np.mean(naive > -margin) > 0.05
