"""How long a variant's load takes: warm-up, fill test, levels, and a search whose limit isn't known beforehand.

The search is the real one (`pipeline.load.search`) with probes that know the answer, run for limits all over its axis: their mean
is what is expected, since nothing is known of where the limit is, and the longest is kept beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from pipeline.load.bounds import Bound
from pipeline.load.fill import HOLD_STEPS, plan_fill
from pipeline.load.judge import Boundary, boundary
from pipeline.load.measure import measured_requests
from pipeline.load.search import NOTHING, Expected, search
from pipeline.load.slo import SearchPlan, Slo
from pipeline.load.workload import read_prompts
from pipeline.planning.roofline import Lengths, Roofline
from pipeline.planning.scoring_lengths import BYTES_PER_TOKEN
from pipeline.results import Capacity
from pipeline.settings.schema import (
    FixedWorkload,
    LoadSettings,
    LognormalWorkload,
    ServerSettings,
    SharedPrefixWorkload,
    WorkloadSettings,
)

QUANTILES = 256
"""Points at which a log-normal is read."""
LIMITS = 24
"""Limits that a search is tried with."""
NEAR = 0.1
"""A load within this of the limit is taken to use up all of a probe's requests."""
CLEARLY_OVER = 0.1
"""Share of the requests over the limit that is taken of a load above it."""
CELL_S = 1.0
"""Around each cell: two readings of the server's metrics, half a second apart (pipeline/stages/measure.py)."""


@dataclass(frozen=True)
class LoadTime:
    """Seconds of one variant's load."""

    warmup_s: float
    fill_s: float
    levels_s: float
    search_s: float
    """The mean over where the limit may be."""
    longest_search_s: float

    @property
    def total_s(self) -> float:
        return self.warmup_s + self.fill_s + self.levels_s + self.search_s


def load_time(
    load: LoadSettings,
    server: ServerSettings,
    slo: Slo,
    searches: tuple[tuple[SearchPlan, float], ...],
    engine: Roofline,
    capacity: Capacity,
) -> LoadTime:
    """What `measure` runs against the server, once it is up."""
    lengths = lengths_of(load.workload)
    warmup_s = (
        engine.drained_s(load.warmup_requests, load.warmup_requests, lengths) if load.warmup_requests else 0.0
    )
    levels_s = load.repeats * sum(
        CELL_S
        + engine.drained_s(
            level + measured_requests(level, load.requests_per_stream, load.min_requests),
            min(level, server.max_num_seqs),
            lengths,
        )
        for level in load.levels
    )
    left_s = [max(0.0, until_s - warmup_s - levels_s) for _, until_s in searches]
    spent = [
        [min(seconds, left) for seconds in _search_s(plan, slo, load.levels, engine, lengths)]
        for (plan, _), left in zip(searches, left_s, strict=True)
    ]
    return LoadTime(
        warmup_s,
        _fill_s(load, server, engine, capacity),
        levels_s,
        sum(sum(seconds) / len(seconds) for seconds in spent),
        sum(max(seconds) for seconds in spent),
    )


def lengths_of(workload: WorkloadSettings) -> Lengths:
    """A workload's lengths; `UserInputError` where its prompts can't be read. What a prefix cache saves isn't deducted."""
    if isinstance(workload, FixedWorkload):
        return Lengths.of([workload.input_tokens], [workload.output_tokens])
    if isinstance(workload, SharedPrefixWorkload):
        return Lengths.of([workload.prefix_tokens + workload.input_tokens], [workload.output_tokens])
    if isinstance(workload, LognormalWorkload):
        return Lengths.of(
            _lognormal(workload.input_median_tokens, workload.input_sigma, 1, workload.input_max_tokens),
            _lognormal(workload.output_median_tokens, workload.output_sigma, 2, workload.output_max_tokens),
        )
    from pathlib import Path

    lines = read_prompts(Path(workload.file), workload.output_tokens)
    prompts = [max(1.0, len(text.encode()) / BYTES_PER_TOKEN) for _, text, _ in lines]
    return Lengths.of(prompts, [outputs for _, _, outputs in lines])


def _lognormal(median: int, sigma: float, least: int, most: int) -> list[float]:
    points = [NormalDist().inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)]
    return [min(max(median * math.exp(sigma * point), least), most) for point in points]


def _fill_s(load: LoadSettings, server: ServerSettings, engine: Roofline, capacity: Capacity) -> float:
    """Prompts until the pool is full, then the steps that hold it; it ends with the first request."""
    if load.fill is None:
        return 0.0
    plan = plan_fill(capacity, load.fill.extra_sequences, server.max_num_seqs, server.max_num_batched_tokens)
    running = plan.offered if plan.predicted_running is None else plan.predicted_running
    lengths = Lengths.of([plan.prompt_tokens], [plan.output_tokens])
    # The first request generates in the steps in which the others' prompts are computed, and some more.
    more = max(HOLD_STEPS, plan.output_tokens * (1 - running / plan.offered))
    return CELL_S + running * engine.prefill_s(lengths) + more * engine.step_s(running, plan.prompt_tokens)


def _search_s(
    plan: SearchPlan, slo: Slo, levels: tuple[int, ...], engine: Roofline, lengths: Lengths
) -> list[float]:
    """What the search takes, for limits evenly all over its axis and beyond either end."""
    line = boundary(slo.percentile, slo.confidence, plan.max_requests)
    low, high = plan.axis.minimum, plan.axis.maximum
    inside = [low + (high - low) * number / LIMITS for number in range(LIMITS)]
    return [
        _search_to_s(limit, plan, slo, line, levels, engine, lengths) for limit in (0.0, *inside, math.inf)
    ]


def _search_to_s(
    limit: float,
    plan: SearchPlan,
    slo: Slo,
    line: Boundary,
    levels: tuple[int, ...],
    engine: Roofline,
    lengths: Lengths,
) -> float:
    """Where it holds up to `limit`."""
    spent = 0.0

    def probe(at: float) -> Bound:
        nonlocal spent
        spent += CELL_S + _cell_s(plan, at, plan.warmup(at, slo) + _judged(line, at, limit), engine, lengths)
        return "pass" if at <= limit else "fail"

    search(plan.axis, probe, expected=_expected(plan, levels, limit))
    return spent


def _expected(plan: SearchPlan, levels: tuple[int, ...], limit: float) -> Expected:
    if plan.mode != "closed":
        return NOTHING
    inside = [level for level in levels if plan.axis.minimum <= level <= plan.axis.maximum]
    return Expected(
        max((level for level in inside if level <= limit), default=None),
        min((level for level in inside if level > limit), default=None),
    )


def _judged(line: Boundary, load: float, limit: float) -> int:
    """Requests that a probe judges, or sends while it waits for those in flight."""
    if abs(load - limit) <= NEAR * limit:
        return line.max_requests
    if load < limit:
        passes = next(n for n, over in enumerate(line.pass_at) if over >= 0)
        return min(passes + round(load), line.max_requests)
    return next(
        (n for n, over in enumerate(line.fail_at) if n and over <= n * CLEARLY_OVER), line.max_requests
    )


def _cell_s(plan: SearchPlan, load: float, requests: int, engine: Roofline, lengths: Lengths) -> float:
    if plan.mode == "closed":
        return engine.closed_loop_s(requests, load, lengths)
    return requests / load
