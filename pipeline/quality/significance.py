"""Exact tests on flips, and what several of them at once are worth.

They answer "is there any difference?", never "is the loss small enough?": that is the interval's to say against the margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from pipeline.quality.intervals import group_sums


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value that flips are as likely one way as the other; 1.0 when nothing flipped.

    Source: McNemar (1947) in its binomial form. It looks at the flips only, and "not significant" says nothing about a
    margin: it is shown beside the interval and never decides.
    """
    flips = gained + lost
    return 1.0 if flips == 0 else float(stats.binomtest(min(gained, lost), flips, 0.5).pvalue)


def sign_flip_exact(differences: Sequence[int], clusters: Sequence[str]) -> float:
    """McNemar's exact test for items that come in clusters: the exact p-value when every cluster's sum may change its sign.

    With one item per cluster it is `mcnemar_exact`. The null distribution of Σ±|sum| is a convolution over the clusters, so
    nothing is drawn at random. Source: Fisher's randomisation test; Datta & Satten (2008), Biometrics 64:501-507, for clusters.
    """
    sums = np.abs(np.rint(group_sums(differences, clusters)[0])).astype(int)
    observed = abs(int(sum(differences)))
    total = int(sums.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for size in sums[sums > 0]:
        chances = 0.5 * (np.roll(chances, size) + np.roll(chances, -size))
    distance = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, chances[distance >= observed].sum()))


def more_flips_exact(flipped: Sequence[bool], floor: Sequence[bool]) -> float:
    """One-sided exact p-value that the variant flips no more items than the A/A control does, over the same items.

    McNemar's argument on the items that flipped in one of the two only; 1.0 where there are none.
    """
    only_variant = sum(1 for own, noise in zip(flipped, floor, strict=True) if own and not noise)
    only_floor = sum(1 for own, noise in zip(flipped, floor, strict=True) if noise and not own)
    apart = only_variant + only_floor
    return 1.0 if apart == 0 else float(stats.binom.sf(only_variant - 1, apart, 0.5))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Step-down adjusted p-values: with them, the chance that any true null among all slices is called a difference is held.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65-70.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, value) in enumerate(sorted(p_values.items(), key=lambda entry: entry[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * value))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}
