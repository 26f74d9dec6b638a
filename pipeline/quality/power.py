"""How many items a decision takes, and what a sample of a given size can show at all.

Planning figures by the normal approximation; the decision itself is the interval's. `alpha` is one-sided: half of
1 − confidence for a two-sided interval.
"""

from __future__ import annotations

import math

from scipy import special

from pipeline.quality.intervals import two_sided_z


def items_to_decide(margin: float, flip_rate: float, alpha: float, power: float) -> int:
    """Items after which a variant with a true difference of 0 is a GO with probability `power`.

    n = (z_{1−alpha} + z_power)² · flip_rate / margin², for a one-sided test at `alpha`. The variance of a paired difference of
    mean 0 is the flip rate. Source: Connor (1987), Biometrics 43:207-211. At 5 % flips, alpha 0.05, power 0.8:
    3092 / 773 / 344 for 1 / 2 / 3 points. Never fewer than the z²(1 − margin)/margin that the score interval takes to
    exclude the margin when nothing flips.
    """
    for name, value in (("margin", margin), ("alpha", alpha), ("power", power)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} {value} isn't between 0 and 1")
    if not 0.0 <= flip_rate <= 1.0:
        raise ValueError(f"flip_rate {flip_rate} isn't between 0 and 1")
    z_alpha, z_power = _quantiles(alpha, power)
    by_power = (z_alpha + z_power) ** 2 * flip_rate / margin**2
    at_no_flips = z_alpha**2 * (1 - margin) / margin
    return math.ceil(max(by_power, at_no_flips))


def smallest_margin(items: float, flip_rate: float, alpha: float, power: float) -> float | None:
    """The smallest margin at which `items` would have decided, with probability `power`, were there no true loss.

    The inverse of `items_to_decide`; None where even a margin of nearly 1 takes more items.
    """
    if items <= 0:
        raise ValueError(f"{items} items are no sample")
    z_alpha, z_power = _quantiles(alpha, power)
    margin = max((z_alpha + z_power) * math.sqrt(flip_rate / items), z_alpha**2 / (items + z_alpha**2))
    return margin if margin < 1.0 else None


def items_to_exclude_margin(delta: float, variance: float, margin: float, confidence: float) -> int | None:
    """Items after which the interval around the observed delta would clear −margin on either side; None at the margin.

    `variance` is that of one item's difference (design effect included). n = z² · variance / (delta + margin)².
    """
    distance = abs(delta + margin)
    if distance < 1e-9:
        return None
    return math.ceil(two_sided_z(confidence) ** 2 * variance / distance**2)


def _quantiles(alpha: float, power: float) -> tuple[float, float]:
    return float(special.ndtri(1 - alpha)), float(special.ndtri(power))
