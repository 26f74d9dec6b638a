"""What an interval promises, counted over every outcome, and sequential runs by the thousand: for the tests and `make bench`.

Outcomes of independent items are (gained, lost) with trinomial probabilities, so coverage is a sum and needs no random
numbers. Sequential runs have too many outcomes for that and are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from pipeline.quality.intervals import paired_score_bounds, score_statistic, two_sided_z
from pipeline.quality.sequential import critical_values, plan_looks

NEGLIGIBLE = 1e-9


def outcomes(n: int, gained_rate: float, lost_rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gained, lost, probability) of every outcome of n items that isn't negligible."""
    most = [int(stats.binom.ppf(1 - NEGLIGIBLE, n, rate)) + 1 for rate in (gained_rate, lost_rate)]
    gained, lost = (
        grid.ravel() for grid in np.meshgrid(*(np.arange(top + 1) for top in most), indexing="ij")
    )
    possible = gained + lost <= n
    gained, lost = gained[possible], lost[possible]
    rates = [gained_rate, lost_rate, 1 - gained_rate - lost_rate]
    chance = np.exp(stats.multinomial.logpmf(np.stack([gained, lost, n - gained - lost], axis=1), n, rates))
    return gained, lost, chance


def coverage(n: int, flips: float, lost_share: float, confidence: float = 0.95) -> float:
    """Probability that the interval holds the true difference; `lost_share` of the flips are losses."""
    gained_rate, lost_rate = flips * (1 - lost_share), flips * lost_share
    gained, lost, chance = outcomes(n, gained_rate, lost_rate)
    low, high = paired_score_bounds(gained, lost, np.array(float(n)), np.array(two_sided_z(confidence)))
    truth = gained_rate - lost_rate
    return float(chance[(low <= truth + 1e-12) & (truth - 1e-12 <= high)].sum())


def false_go_rate(n: int, flips: float, margin: float, confidence: float = 0.95) -> float:
    """Probability of a GO for a variant that is exactly `margin` worse."""
    gained, lost, chance = outcomes(n, (flips - margin) / 2, (flips + margin) / 2)
    low, _ = paired_score_bounds(gained, lost, np.array(float(n)), np.array(two_sided_z(confidence)))
    return float(chance[low > -margin].sum())


@dataclass(frozen=True)
class SequentialRuns:
    """Shares of simulated runs that ended so, and the mean share of the items that they took."""

    go: float
    no_go: float
    items_share: float


def sequential_runs(
    n: int,
    looks: int,
    flips: float,
    delta: float,
    margin: float,
    *,
    repeats: int = 10_000,
    seed: int = 0,
    spending: str = "pocock",
    confidence: float = 0.95,
    bounds: bool = True,
) -> SequentialRuns:
    """Runs that look `looks` times over n items. `bounds=False` looks as often with the fixed test's bound: the mistake."""
    plan = plan_looks(n, looks, confidence, spending)  # type: ignore[arg-type]
    z = np.array(critical_values(plan) if bounds else [two_sided_z(confidence)] * len(plan.items))
    rng = np.random.default_rng(seed)
    rates = [(flips + delta) / 2, (flips - delta) / 2, 1 - flips]
    steps = np.diff([0, *plan.items])
    counts = np.stack([rng.multinomial(step, rates, size=repeats) for step in steps], axis=1).cumsum(axis=1)
    at = np.array(plan.items, dtype=float)
    # The interval is above −margin exactly when the score statistic there is above z: no need to solve for the bounds.
    score = score_statistic(counts[..., 0], counts[..., 1], at, np.array(-margin))
    stopped = np.abs(score) > z
    last = np.where(stopped.any(axis=1), stopped.argmax(axis=1), len(at) - 1)
    ended = score[np.arange(repeats), last]
    return SequentialRuns(
        float(np.mean(ended > z[last])), float(np.mean(ended < -z[last])), float(np.mean(at[last]) / n)
    )
