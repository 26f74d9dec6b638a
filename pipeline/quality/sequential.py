"""Looking at the result while it comes in, and stopping early without paying for it in false GOs.

Looking five times with the fixed bound of 1.96 makes the 2.5 % error 7 %. So each look gets a share of the error to spend,
and its bound is whatever spends just that share given that no earlier look stopped (alpha spending, Lan & DeMets 1983).
A look's bound is used as the z of the paired interval: a repeated confidence interval, which covers at all looks together
(Jennison & Turnbull 1989, J. R. Statist. Soc. B 51:305-361). The rule stays the one of a fixed sample: GO if the interval is
above −margin, NO-GO if it is below; only the interval is wider early on.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, special

from pipeline.quality.intervals import Array

Spending = Literal["pocock", "obrien-fleming"]

_GRID = 801  # points of the density that is integrated, odd for Simpson's rule
_FAR = 8.0  # standard deviations beyond which the density counts as 0


@dataclass(frozen=True)
class Looks:
    """When to look: the items scored at each look, rising, the last one all of them. `alpha` is the error of one side.

    The information at a look is its share of the items: the variance of an item's difference is the same at all looks.
    """

    items: tuple[int, ...]
    alpha: float
    spending: Spending

    def __post_init__(self) -> None:
        if not self.items or any(later <= earlier for earlier, later in itertools.pairwise((0, *self.items))):
            raise ValueError(f"looks at {self.items} items: allowed are rising numbers from 1")
        if not 0.0 < self.alpha < 0.5:
            raise ValueError(f"alpha {self.alpha} isn't between 0 and 0.5")


def look_items(items: int, looks: int) -> tuple[int, ...]:
    """After how many of `items` items each of `looks` evenly spaced looks is; a set with fewer items has one look an item."""
    if items < 1 or looks < 1:
        raise ValueError(f"{looks} looks at {items} items: there must be at least one of each")
    looks = min(looks, items)
    return tuple(dict.fromkeys(round(items * (number + 1) / looks) for number in range(looks)))


def plan_looks(items: int, looks: int, confidence: float, spending: Spending) -> Looks:
    """`looks` looks, evenly spaced over `items`; `confidence` is that of the two-sided interval over all looks."""
    return Looks(look_items(items, looks), (1 - confidence) / 2, spending)


def spent(fraction: float, alpha: float, spending: Spending) -> float:
    """Error that may be spent by the time that `fraction` of the information is in.

    Pocock-like alpha·ln(1 + (e − 1)·t) stops early often; O'Brien-Fleming-like 2 − 2Φ(z_{1−alpha/2} / √t) keeps
    nearly all for the end. Source: Lan & DeMets (1983), Biometrika 70:659-663.
    """
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * fraction)
    return float(2 * special.ndtr(special.ndtri(alpha / 2) / math.sqrt(fraction)))


@functools.lru_cache(maxsize=64)
def critical_values(looks: Looks) -> tuple[float, ...]:
    """The bound of each look, as a normal quantile. One look gives the fixed test's.

    Recursive integration of the density of the score that hasn't crossed yet: Armitage, McPherson & Rowe (1969),
    J. R. Statist. Soc. A 132:235-244. The other side's bound is ignored, which is on the safe side.
    """
    fractions = [count / looks.items[-1] for count in looks.items]
    budget = np.diff([0.0, *(spent(fraction, looks.alpha, looks.spending) for fraction in fractions)])
    bounds: list[float] = []
    grid, mass = np.zeros(1), np.ones(1)  # the score starts at 0 with certainty
    before = 0.0
    for fraction, error in zip(fractions, budget, strict=True):
        step = math.sqrt(fraction - before)
        bound = _bound_that_spends(grid, mass, step, float(error))
        bounds.append(bound / math.sqrt(fraction))
        grid, mass = _not_crossed(grid, mass, step, -_FAR * math.sqrt(fraction), bound)
        before = fraction
    return tuple(bounds)


def confidence_at(looks: Looks, look: int) -> float:
    """Two-sided level of the interval at look number `look` (from 1): 2Φ(bound) − 1."""
    return float(2 * special.ndtr(critical_values(looks)[look - 1]) - 1)


def _bound_that_spends(grid: Array, mass: Array, step: float, error: float) -> float:
    crossing: Callable[[float], float] = lambda bound: (  # noqa: E731
        float(mass @ special.ndtr((grid - bound) / step)) - error
    )
    return float(optimize.brentq(crossing, -_FAR, 2 * _FAR))


def _not_crossed(grid: Array, mass: Array, step: float, low: float, high: float) -> tuple[Array, Array]:
    """Grid and probability mass of the score after one more step, below the bound `high`."""
    new = np.linspace(low, high, _GRID)
    weights = np.ones(_GRID)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    weights *= (new[1] - new[0]) / 3
    distance = (new[:, None] - grid[None, :]) / step
    density = (np.exp(-0.5 * distance**2) / (math.sqrt(2 * math.pi) * step)) @ mass
    return new, weights * density
