"""Concurrency and rate under the SLO: the search's probes as cells, and their records as published figures.

Closed loop: as many streams as the probe asks for; the first request of each is warm-up. Open loop: Poisson arrivals at the
probe's rate, latency from the scheduled arrival. An overload shows there only as a queue that grows: at a rate that is a
relative step r above what the server can do, requests wait longer than the TTFT limit from limit x (1 + r) / r seconds on. So
long is the warm-up; a rate that passes after it isn't overloaded by more than the search's resolution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.load.judge import Judge, boundary
from pipeline.load.metrics import Limits, percentile, tpot_s, ttft_s, window
from pipeline.load.records import RequestRecord
from pipeline.load.search import NOTHING, Axis, Expected, Found
from pipeline.results import LoadLevel, Probe, SloSearch

if TYPE_CHECKING:
    from pipeline.settings import Settings

Mode = Literal["closed", "open"]
UNITS: dict[Mode, Literal["streams", "requests/s"]] = {"closed": "streams", "open": "requests/s"}

MAX_LAG_SHARE = 0.1  # of the TTFT limit: a client that is later by more distorts what it measures
MAX_CPU_SHARE = 0.9  # the client is one event loop on one core


@dataclass(frozen=True)
class Slo:
    """Limits that a share `percentile` of the requests must meet, at the confidence of the binomial bound."""

    limits: Limits
    percentile: float
    confidence: float


@dataclass(frozen=True)
class SearchPlan:
    """One search: its loads, and how many requests a probe may judge."""

    mode: Mode
    axis: Axis
    max_requests: int

    def warmup(self, load: float, slo: Slo) -> int:
        """Requests before the judged ones at a load."""
        if self.mode == "closed":
            return round(load)
        step = self.axis.resolution
        return math.ceil(load * slo.limits.ttft_ms / 1e3 * (1 + step) / step)

    def requests(self, load: float, slo: Slo) -> int:
        return self.warmup(load, slo) + self.max_requests


def slo_of(settings: Settings) -> Slo:
    """The SLO as the load judges by it."""
    slo = settings.slo
    return Slo(Limits(slo.ttft_ms, slo.tpot_ms), slo.percentile, slo.confidence)


def search_plans(settings: Settings) -> tuple[tuple[SearchPlan, float], ...]:
    """The profile's searches, each with the time from which on it starts no probe: closed loop first."""
    load, found = settings.load, []
    if given := load.search:
        axis = Axis(given.start, given.minimum, given.maximum, whole=True, resolution=given.resolution)
        found.append((SearchPlan("closed", axis, given.max_requests), given.until_s))
    if rates := load.open_loop:
        axis = Axis(rates.start_rps, rates.minimum_rps, rates.maximum_rps, False, rates.resolution)
        found.append((SearchPlan("open", axis, rates.max_requests), rates.until_s))
    return tuple(found)


def arrivals(rate_rps: float, count: int, seed: str) -> tuple[float, ...]:
    """A Poisson process' first `count` arrivals, scaled so that the last one is at count / rate exactly."""
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    scale = count / rate_rps / sum(gaps)
    found, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        found.append(now)
    return tuple(found)


def expected_of(
    levels: Sequence[LoadLevel], records: Sequence[RequestRecord], slo: Slo, plan: SearchPlan
) -> Expected:
    """What the levels' cells, all repeats together, let a closed loop's search expect; nothing of an open loop's rates.

    A level seems to hold when no more of its measured requests were over either limit than the SLO's percentile allows. Its last
    requests ran while others had ended, and a look at it comes before those of the probes: so this decides nothing, and every
    pass and fail is a probe's. Where a level that seems to break lies below one that seems to hold, only the latter counts.
    """
    if plan.mode != "closed":
        return NOTHING
    trusted = {level.cell: level.concurrency for level in levels if not _saturated(level.client_cpu_share)}
    seen: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.cell in trusted and not record.warmup and record.outcome != "stopped":
            seen.setdefault(trusted[record.cell], []).append(record)
    holds = {load for load, of_level in seen.items() if _seems_to_hold(of_level, slo)}
    top, (least, most) = max(holds, default=0), (plan.axis.minimum, plan.axis.maximum)
    return Expected(
        min(top, most) if top >= least else None,
        min((load for load in seen if load > top and least <= load <= most), default=None),
    )


def _seems_to_hold(records: Sequence[RequestRecord], slo: Slo) -> bool:
    over_ttft = sum(ttft_s(record) * 1e3 > slo.limits.ttft_ms for record in records)
    over_tpot = sum(tpot_s(record) * 1e3 > slo.limits.tpot_ms for record in records)
    return max(over_ttft, over_tpot) / len(records) <= 1 - slo.percentile + 1e-9


def _saturated(client_cpu_share: float | None) -> bool:
    return client_cpu_share is not None and client_cpu_share > MAX_CPU_SHARE


def make_judge(slo: Slo, plan: SearchPlan, load: float) -> Judge:
    """The judge of one probe."""
    line = boundary(slo.percentile, slo.confidence, plan.max_requests)
    return Judge(slo.limits, line, plan.warmup(load, slo))


def probe_result(
    records: Sequence[RequestRecord],
    load: float,
    slo: Slo,
    plan: SearchPlan,
    client_cpu_share: float | None = None,
) -> Probe:
    """A probe's figures from its records alone. A saturated client makes it undecided: the server wasn't what was measured."""
    judge = make_judge(slo, plan, load)
    for record in records:
        judge.see(record)
    found = judge.judgement()
    judged = [record for record in records if not record.warmup and record.outcome != "stopped"]
    start_s, end_s = window(records)
    lags = sorted(record.start_s - record.origin_s for record in records)
    lag_ms = percentile(lags, 0.99) * 1e3 if plan.mode == "open" else None
    saturated = _saturated(client_cpu_share) or (
        lag_ms is not None and lag_ms > MAX_LAG_SHARE * slo.limits.ttft_ms
    )
    return Probe(
        cell=records[0].cell,
        load=load,
        decision="undecided" if saturated else found.decision,
        judged=found.judged,
        over_ttft=found.over_ttft,
        over_tpot=found.over_tpot,
        requests=len(records),
        failed=sum(record.failed for record in records),
        ttft_ms=_seen_ms([ttft_s(record) for record in judged], slo.percentile),
        tpot_ms=_seen_ms([tpot_s(record) for record in judged], slo.percentile),
        duration_s=end_s - start_s,
        schedule_lag_p99_ms=lag_ms,
        client_cpu_share=client_cpu_share,
        client_saturated=saturated,
    )


def _seen_ms(values_s: Sequence[float], share: float) -> float | None:
    if not values_s:
        return None
    found = percentile(sorted(values_s), share) * 1e3
    return found if math.isfinite(found) else None


def search_result(
    plan: SearchPlan, slo: Slo, found: Found, probes: Sequence[Probe], duration_s: float
) -> SloSearch:
    """The search as it is published, with its answer in words."""
    return SloSearch(
        mode=plan.mode,
        unit=UNITS[plan.mode],
        ttft_ms=slo.limits.ttft_ms,
        tpot_ms=slo.limits.tpot_ms,
        percentile=slo.percentile,
        confidence=slo.confidence,
        low=found.low,
        high=found.high,
        note=_answer(plan, slo, found, probes),
        probes=list(probes),
        requests=sum(probe.requests for probe in probes),
        duration_s=duration_s,
    )


def _answer(plan: SearchPlan, slo: Slo, found: Found, probes: Sequence[Probe]) -> str:
    unit = UNITS[plan.mode]
    ended = "; its time ran out before the interval was as narrow as it could be" if found.stopped else ""
    if any(probe.client_saturated for probe in probes):
        ended += "; the client was saturated at some loads, which therefore decide nothing"
    if found.low is None:
        best = _best(slo, probes)
        least = plan.axis.minimum
        undecided = found.high is None or found.high >= least
        loads = "no load" if not plan.axis.whole or least == 1 else f"no load from {least:g} {unit} on"
        shown = "was shown to meet the SLO" if undecided else "meets the SLO"
        return f"{loads} {shown}: {best}{ended}"
    if found.high is None:
        top = max(probe.load for probe in probes)
        above = (
            "the highest tried"
            if top == found.low
            else f"and nothing up to {top:.4g}, the highest tried, was shown to break it"
        )
        return f"the SLO holds at {found.low:.4g} {unit}, {above}{ended}"
    breaks = found.high + 1 if plan.axis.whole else found.high * (1 + plan.axis.resolution)
    if breaks > found.low * (1 + 1e-9) + (1 if plan.axis.whole else found.low * plan.axis.resolution):
        return f"the SLO holds at {found.low:.4g} {unit} and breaks at {breaks:.4g}; between the two it isn't decided{ended}"
    return f"the SLO holds up to {found.low:.4g} {unit}{ended}"


def _best(slo: Slo, probes: Sequence[Probe]) -> str:
    """What came closest to the limits, in words."""
    seen = [probe for probe in probes if probe.ttft_ms is not None and probe.tpot_ms is not None]
    if not seen:
        return "no request completed"

    def excess(probe: Probe) -> float:
        assert probe.ttft_ms is not None and probe.tpot_ms is not None
        return max(probe.ttft_ms / slo.limits.ttft_ms, probe.tpot_ms / slo.limits.tpot_ms)

    best = min(seen, key=excess)
    return (
        f"the best seen, at {best.load:g}, is TTFT {best.ttft_ms:.0f} ms and TPOT {best.tpot_ms:.0f} ms at "
        f"p{slo.percentile * 100:g}, the limits are {slo.limits.ttft_ms:g} and {slo.limits.tpot_ms:g} ms"
    )
