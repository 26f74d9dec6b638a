"""Repeats and comparisons: intervals by bootstrap over repeats, drift, and what an FP8 KV cache changes, split into its parts.

The repeat is the unit: requests of one cell share a server's state and are no independent sample of a variant's speed. With one
or two repeats there is no interval, and none is made up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.results import LoadLevel, Measurement

MIN_REPEATS = 3
RESAMPLES = 4000
SEED = 20260101
DRIFT = 0.05  # a steady rise or fall by more than this from the first repeat to the last is no noise to average over

Interval = tuple[float, float]
Figure = Callable[[LoadLevel], float | None]


@dataclass(frozen=True)
class Estimate:
    """Mean over repeats. `interval` is None with fewer than three; `drifts` None likewise."""

    value: float
    repeats: int
    interval: Interval | None
    drifts: bool | None


@dataclass(frozen=True)
class Ratio:
    """Other / base. `interval` by bootstrap over the repeats of both, None where either has fewer than three."""

    value: float
    interval: Interval | None


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean of at least one repeat, with its percentile-bootstrap interval and the drift alarm."""
    mean = sum(values) / len(values)
    if len(values) < MIN_REPEATS:
        return Estimate(mean, len(values), None, None)
    return Estimate(mean, len(values), _interval(_resampled_means(values, 0), confidence), drifts(values))


def ratio(base: Sequence[float], other: Sequence[float], confidence: float = 0.95) -> Ratio | None:
    """The means' ratio; None where a side has no value or the base is zero."""
    if not base or not other or not sum(base):
        return None
    value = (sum(other) / len(other)) / (sum(base) / len(base))
    if min(len(base), len(other)) < MIN_REPEATS:
        return Ratio(value, None)
    return Ratio(value, _interval(_resampled_means(other, 1) / _resampled_means(base, 0), confidence))


def drifts(values: Sequence[float]) -> bool:
    """Does every repeat go further the same way, and the last differ from the first by more than 5 %?"""
    steps = [after - before for before, after in itertools.pairwise(values)]
    one_way = all(step > 0 for step in steps) or all(step < 0 for step in steps)
    return one_way and abs(values[-1] - values[0]) > DRIFT * abs(values[0])


def _resampled_means(values: Sequence[float], stream: int) -> np.ndarray:
    rng = np.random.default_rng([SEED, stream])
    sample = np.asarray(values, dtype=float)
    return np.asarray(sample[rng.integers(0, len(sample), (RESAMPLES, len(sample)))].mean(axis=1))


def _interval(means: np.ndarray, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def at_level(measurement: Measurement, concurrency: int, figure: Figure) -> list[float]:
    """One value per repeat of a level, in their order; a repeat without the figure is left out."""
    found = [figure(level) for level in measurement.levels if level.concurrency == concurrency]
    return [value for value in found if value is not None]


def concurrencies(measurement: Measurement) -> list[int]:
    """The levels that were run, ascending."""
    return sorted({level.concurrency for level in measurement.levels})


def control_level(measurement: Measurement) -> int | None:
    """The highest level whose requests all fit this variant's pool at their own length: more pool can't help there."""
    capacity = measurement.capacity
    if capacity.reported_tokens is None:
        return None
    blocks = capacity.reported_tokens // capacity.block_size - 1
    fitting = [
        level.concurrency
        for level in measurement.levels
        if level.completed and level.concurrency * _blocks(level, capacity.block_size) <= blocks
    ]
    return max(fitting, default=None)


def _blocks(level: LoadLevel, block_size: int) -> int:
    """Blocks of one request of a level, by its mean length."""
    return math.ceil((level.input_tokens + level.output_tokens) / level.completed / block_size)


@dataclass(frozen=True)
class Effect:
    """One part of the difference between two variants: other / base."""

    part: str
    what: str
    ratio: Ratio | None


def effects(base: Measurement, other: Measurement) -> list[Effect]:
    """What the second variant changes against the first (same weights, another KV dtype), part by part.

    Tokens: the pool. Prefill: TTFT at the lowest level, where nothing queues. Decode: TPOT at the control level, which fits
    the base's pool. Saturated: goodput and
    throughput at the highest level. Control: running requests at the control level, where more pool
    must not help.
    """
    found = [Effect("KV tokens", "reported pool", _tokens(base, other))]
    shared = sorted(set(concurrencies(base)) & set(concurrencies(other)))
    control = control_level(base)

    def compare(level: int | None, figure: Figure) -> Ratio | None:
        if level not in shared:
            return None
        return ratio(at_level(base, level, figure), at_level(other, level, figure))

    low, high = (shared[0], shared[-1]) if shared else (None, None)
    found.append(
        Effect("prefill", f"TTFT p50 at {low} streams", compare(low, lambda level: level.ttft.p50_ms))
    )
    found.append(
        Effect("decode", f"TPOT p50 at {control} streams", compare(control, lambda level: level.tpot.p50_ms))
    )
    found.append(
        Effect("saturated goodput", f"requests/s within the SLO at {high} streams", compare(high, _goodput))
    )
    found.append(
        Effect("saturated throughput", f"output tok/s at {high} streams", compare(high, _throughput))
    )
    found.append(
        Effect(
            "control",
            f"peak running at {control} streams, which fit either pool: no gain expected",
            compare(control, lambda level: level.peak_running),
        )
    )
    return found


def _throughput(level: LoadLevel) -> float | None:
    steady = level.steady.output_throughput_tok_s if level.steady else None
    return level.output_throughput_tok_s if steady is None else steady


def _goodput(level: LoadLevel) -> float | None:
    steady = level.steady.goodput_rps if level.steady else None
    return level.goodput_rps if steady is None else steady


def _tokens(base: Measurement, other: Measurement) -> Ratio | None:
    before, after = base.capacity.reported_tokens, other.capacity.reported_tokens
    return Ratio(after / before, None) if before and after else None
