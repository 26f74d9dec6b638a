"""Confidence intervals and tests for right/wrong answers: one proportion, and two on the same items.

Pure formulas, each with its source; `pipeline.quality.statistics` applies them to eval samples.
Proportions are in 0..1, differences in −1..1, confidence levels are two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

Interval = tuple[float, float]


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


def _tango_score(gained: float, lost: float, n: float, delta: float) -> float:
    """Tango's score statistic for H0: P(gained) − P(lost) = delta. It falls as delta rises."""
    a = 2 * n
    b = -gained - lost + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    # The constrained maximum-likelihood estimate of P(lost); below −delta P(gained) would be negative.
    lost_rate = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    lost_rate = max(lost_rate, 0.0, -delta)
    variance = n * (2 * lost_rate + delta * (1 - delta))
    distance = gained - lost - n * delta
    if variance <= 0.0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def paired_score_interval(gained: float, lost: float, n: float, confidence: float) -> Interval:
    """Score interval of the difference of two proportions on the same n items, (gained − lost) / n.

    `gained` and `lost` count the items that only the second or only the first got right. They may be fractions, for
    an effective sample size. It inverts the score test, so that it agrees with that test at any margin, has a width when
    nothing flipped (±z² / (n + z²)), and keeps its coverage at a few flips, where the normal interval doesn't.
    Source: Tango (1998), Statistics in Medicine 17:891-908, eq. 24-26. `ValueError` for impossible counts.
    """
    if n <= 0 or gained < 0 or lost < 0 or gained + lost > n * (1 + 1e-12):
        raise ValueError(f"{gained} gained and {lost} lost of {n} items is impossible")
    z = two_sided_z(confidence)
    estimate = (gained - lost) / n
    edge = 1.0 - 1e-12

    def bound(sign: float, end: float) -> float:
        def excess(delta: float) -> float:
            return sign * _tango_score(gained, lost, n, delta) - z

        if excess(end) <= 0.0:  # the whole side is compatible with the data
            return math.copysign(1.0, end)
        inside = min(max(estimate, -edge), edge)
        if excess(inside) >= 0.0:  # every item flipped one way: the bound is the estimate
            return estimate
        return float(optimize.brentq(excess, *sorted((inside, end)), xtol=1e-10))

    return bound(1.0, -edge), bound(-1.0, edge)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value that flips are as likely one way as the other; 1.0 when nothing flipped.

    Source: McNemar (1947) in its binomial form. It looks at the flips only, and "not significant" says nothing about a
    margin: it is shown beside the interval and never decides.
    """
    flips = gained + lost
    return 1.0 if flips == 0 else float(stats.binomtest(min(gained, lost), flips, 0.5).pvalue)


def _group_sums(values: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Per cluster: the sum of the values and the number of items."""
    _, index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    return np.bincount(index, weights=np.asarray(values, dtype=float)), np.bincount(index)


def clustered_se(differences: Sequence[float], clusters: Sequence[str]) -> float | None:
    """Standard error of the mean difference when items of one cluster move together; None with one cluster only.

    SE² = G/(G−1) · Σ_g (Σ_{i in g} (d_i − mean))² / n². Source: Liang & Zeger (1986), Biometrika 73:13-22, with the usual
    small-sample factor; Miller (2024), arXiv 2411.00640, section 2.2, for evals. With one item per cluster it is the
    usual standard error of paired differences.
    """
    sums, sizes = _group_sums(differences, clusters)
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
    _, sizes = _group_sums(differences, clusters)
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
    n = len(differences)
    if n == 0 or n != len(clusters):
        raise ValueError(f"{n} differences and {len(clusters)} clusters")
    effect = design_effect(differences, clusters)
    gained = sum(1 for difference in differences if difference > 0)
    lost = sum(1 for difference in differences if difference < 0)
    return paired_score_interval(gained / effect, lost / effect, n / effect, confidence)


def normal_interval(delta: float, se: float, confidence: float) -> Interval:
    """delta ± z·SE: the interval that `paired_interval` is checked against in the tests; it has no width at SE 0."""
    half = two_sided_z(confidence) * se
    return delta - half, delta + half


def items_to_decide(margin: float, flip_rate: float, alpha: float, power: float) -> int:
    """Items after which a variant with a true difference of 0 is a GO with probability `power`.

    n = (z_{1−alpha} + z_power)² · flip_rate / margin², for a one-sided test at `alpha` (half of 1 − confidence for a
    two-sided interval). The variance of a paired difference of mean 0 is the flip rate. Source: Connor (1987),
    Biometrics 43:207-211. At 5 % flips, alpha 0.05, power 0.8: 3092 / 773 / 344 for 1 / 2 / 3 points. Never fewer than the
    z²(1 − margin)/margin that the score interval takes to exclude the margin when nothing flips.
    """
    for name, value in (("margin", margin), ("alpha", alpha), ("power", power)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} {value} isn't between 0 and 1")
    if not 0.0 <= flip_rate <= 1.0:
        raise ValueError(f"flip_rate {flip_rate} isn't between 0 and 1")
    z_alpha, z_power = float(stats.norm.ppf(1 - alpha)), float(stats.norm.ppf(power))
    by_power = (z_alpha + z_power) ** 2 * flip_rate / margin**2
    at_no_flips = z_alpha**2 * (1 - margin) / margin
    return math.ceil(max(by_power, at_no_flips))
