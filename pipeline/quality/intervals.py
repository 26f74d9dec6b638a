"""Confidence intervals and tests for right/wrong answers: one proportion, and two on the same items.

Pure formulas, each with its source; `pipeline.quality.statistics` applies them to eval samples.
Proportions are in 0..1, differences in −1..1, confidence levels are two-sided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Interval = tuple[float, float]
Array = NDArray[np.float64]
_RESAMPLES_AT_ONCE = 250  # bounds the memory on sets of tens of thousands of items
_BISECTIONS = 50  # halvings of an interval of at most 2: to the last digit of a double


def two_sided_z(confidence: float) -> float:
    """Normal quantile of a two-sided interval: 1.96 for 0.95. `ValueError` outside (0, 1)."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence {confidence} isn't between 0 and 1")
    return float(stats.norm.ppf(0.5 + confidence / 2))


def wilson_interval(successes: int, n: int, confidence: float) -> Interval:
    """Score interval of one proportion. Source: Wilson (1927), JASA 22:209-212.

    Unlike the normal one it stays inside 0..1 and has a width at 0 and at n successes.
    `ValueError` for n < 1 or successes outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is no proportion")
    z2 = two_sided_z(confidence) ** 2
    p = successes / n
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def paired_score_bounds(gained: Array, lost: Array, n: Array, z: Array) -> tuple[Array, Array]:
    """Score interval of the difference of two proportions on the same n items, (gained − lost) / n; all arrays broadcast.

    `gained` and `lost` count the items that only the second or only the first got right. They may be fractions, for
    an effective sample size; `z` is the normal quantile (1.96, or a sequential bound). It inverts the score test, so that
    it agrees with that test at any margin, has a width when nothing flipped (±z² / (n + z²)), and keeps its coverage at a few
    flips, where the normal interval doesn't. Solved by bisection for all rows at once, so that a simulation of 20,000
    experiments takes a moment. Source: Tango (1998), Statistics in Medicine 17:891-908, eq. 24-26.
    """
    gained, lost, n, z = (np.asarray(x, dtype=float) for x in np.broadcast_arrays(gained, lost, n, z))
    estimate = (gained - lost) / n

    def solved(end: float, sign: float) -> Array:
        outside, inside = np.full(estimate.shape, end), estimate.copy()
        for _ in range(_BISECTIONS):
            middle = (outside + inside) / 2
            excluded = sign * score_statistic(gained, lost, n, middle) > z
            outside, inside = np.where(excluded, middle, outside), np.where(excluded, inside, middle)
        return inside

    return solved(-1.0, 1.0), solved(1.0, -1.0)


def score_statistic(gained: Array, lost: Array, n: Array, delta: Array) -> Array:
    """Tango's score statistic for H0: P(gained) − P(lost) = delta, a standard normal under H0. It falls as delta rises."""
    b = -gained - lost + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    # The constrained maximum-likelihood estimate of P(lost); below −delta P(gained) would be negative.
    lost_rate = (np.sqrt(np.maximum(0.0, b * b - 8 * n * c)) - b) / (4 * n)
    lost_rate = np.maximum(lost_rate, np.maximum(0.0, -delta))
    variance = n * (2 * lost_rate + delta * (1 - delta))
    distance = gained - lost - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        found = distance / np.sqrt(np.maximum(variance, 0.0))
    return np.where(np.isnan(found), 0.0, found)


@functools.lru_cache(maxsize=4096)  # slices and tests ask for the same few counts again and again
def paired_score_interval(gained: float, lost: float, n: float, confidence: float) -> Interval:
    """`paired_score_bounds` of one comparison. `ValueError` for impossible counts."""
    if n <= 0 or gained < 0 or lost < 0 or gained + lost > n * (1 + 1e-12):
        raise ValueError(f"{gained} gained and {lost} lost of {n} items is impossible")
    low, high = paired_score_bounds(
        np.array(gained), np.array(lost), np.array(n), np.array(two_sided_z(confidence))
    )
    return float(low), float(high)


def group_sums(values: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Per cluster: the sum of the values and the number of items."""
    _, index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    return np.bincount(index, weights=np.asarray(values, dtype=float)), np.bincount(index)


def clustered_se(differences: Sequence[float], clusters: Sequence[str]) -> float | None:
    """Standard error of the mean difference when items of one cluster move together; None with one cluster only.

    SE² = G/(G−1) · Σ_g (Σ_{i in g} (d_i − mean))² / n². Source: Liang & Zeger (1986), Biometrika 73:13-22, with the usual
    small-sample factor; Miller (2024), arXiv 2411.00640, section 2.2, for evals. With one item per cluster it is the
    usual standard error of paired differences.
    """
    sums, sizes = group_sums(differences, clusters)
    groups = len(sums)
    if groups < 2:
        return None
    n = int(sizes.sum())
    residuals = sums - sizes * (sums.sum() / n)
    return float(math.sqrt(groups / (groups - 1) * float((residuals**2).sum())) / n)


def design_effect(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """How many items are worth one independent item, at least 1: the effective sample size is n divided by it.

    Clustered over unclustered variance, as in Rao & Scott (1992), Biometrics 48:577-585. Few flips say little about
    how flips cluster, and none say nothing, so the estimate is pulled towards its worst case (a cluster flips as one:
    Σm²/n, Kish 1965) with the weight of one observed flip. Without that, a set whose clusters move together would earn
    a narrow interval from the luck of showing no flip at all (a simulation in the tests shows it).
    """
    _, sizes = group_sums(differences, clusters)
    n = int(sizes.sum())
    worst = float((sizes.astype(float) ** 2).sum()) / n
    if worst <= 1.0:
        return 1.0
    flips = sum(1 for difference in differences if difference != 0)
    grouped = clustered_se(differences, clusters)
    if grouped is None:
        return worst
    simple = clustered_se(differences, [str(index) for index in range(n)])
    correlation = 0.0
    if simple:
        correlation = min(1.0, max(0.0, ((grouped / simple) ** 2 - 1.0) / (worst - 1.0)))
    return 1.0 + (worst - 1.0) * (correlation * flips + 1.0) / (flips + 1.0)


def paired_interval(differences: Sequence[int], clusters: Sequence[str], confidence: float) -> Interval:
    """THE interval of a paired accuracy difference: Tango's score interval at the effective sample size.

    `differences` holds +1 (only the variant is right), −1 (only the reference is) or 0 per item. Why this one: with a
    few hundred items and a few percent of flips the normal interval is too narrow and vanishes at zero flips, and
    neither it nor the plain score interval knows that items drawn from one passage flip together.
    """
    return paired_score_interval(*effective_counts(differences, clusters), confidence)


def effective_counts(differences: Sequence[int], clusters: Sequence[str]) -> tuple[float, float, float]:
    """Gained, lost and items, each divided by the design effect: what the clustered items are worth independent ones."""
    n = len(differences)
    if n == 0 or n != len(clusters):
        raise ValueError(f"{n} differences and {len(clusters)} clusters")
    effect = design_effect(differences, clusters)
    gained = sum(1 for difference in differences if difference > 0)
    lost = sum(1 for difference in differences if difference < 0)
    return gained / effect, lost / effect, n / effect


def normal_interval(delta: float, se: float, confidence: float) -> Interval:
    """delta ± z·SE: the interval that `paired_interval` is checked against in the tests; it has no width at SE 0."""
    half = two_sided_z(confidence) * se
    return delta - half, delta + half


def bootstrap_interval(
    differences: Sequence[int],
    clusters: Sequence[str],
    confidence: float,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap of the mean difference, whole clusters drawn with replacement; None with one cluster only.

    Shown beside the score interval, never deciding: with few flips it is too narrow, and with none it has no width. Where
    the two agree, the result doesn't hang on a formula. Source: Davison & Hinkley (1997), Bootstrap Methods, section 3.8.
    """
    sums, sizes = group_sums(differences, clusters)
    groups = len(sums)
    if groups < 2:
        return None
    if not sums.any():
        return 0.0, 0.0
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        end = min(start + _RESAMPLES_AT_ONCE, resamples)
        drawn = rng.integers(0, groups, size=(end - start, groups), dtype=np.int32)
        means[start:end] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
