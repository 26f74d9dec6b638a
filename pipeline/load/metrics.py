"""Request records and server samples in, one cell's figures out. Pure: the report and the tests recompute with it.

Each metric is defined once, in `METRICS`, and nowhere else. Percentiles are nearest-rank (the inverse of the empirical
distribution function; Hyndman & Fan 1996, type 1): the smallest observed value that at least that share of the sample
doesn't exceed, so a percentile is always a latency that some request really had. A failed request counts as infinitely
late in all of them and is never dropped; where a percentile, the mean or the maximum is thereby infinite it is None
(JSON has no infinity) and `failed` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import UserInputError
from pipeline.load.bounds import requests_needed
from pipeline.load.records import RequestRecord
from pipeline.load.steady import phases, tokens_within
from pipeline.results import Distribution, LoadLevel, SteadyWindow

TimelineRow = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """A metric's name, unit and the sentence that defines it."""

    name: str
    unit: str
    definition: str


METRICS = (
    Metric(
        "TTFT",
        "ms",
        "time to first token: request sent to the first chunk that carries a token, the server's queue included; a chunk "
        "without a token doesn't count. In an open loop it counts from the scheduled arrival",
    ),
    Metric(
        "ITL per chunk",
        "ms",
        "inter-token latency as a reader sees it: gap between two successive chunks of one request; all gaps pooled",
    ),
    Metric(
        "ITL per token",
        "ms",
        "the same gap shared evenly among the tokens that the chunk carries, by the server's own running count",
    ),
    Metric(
        "TPOT",
        "ms",
        "time per output token after the first: (E2EL - TTFT) / (output tokens - 1), per request",
    ),
    Metric(
        "E2EL",
        "ms",
        "end-to-end latency: request sent (open loop: scheduled) to the last chunk that carries a token",
    ),
    Metric(
        "output throughput",
        "tok/s",
        "whole run: output tokens of completed requests / (first request sent to last request ended), ramp and drain "
        "included. Steady: output tokens that arrived in the steady window / its length",
    ),
    Metric(
        "total throughput",
        "tok/s",
        "the same with prompt tokens added; in the steady window they count at their first output token",
    ),
    Metric("request throughput", "req/s", "completed requests over the same time"),
    Metric(
        "goodput",
        "req/s",
        "completed requests that met every limit of the SLO, over the same time",
    ),
    Metric(
        "steady window",
        "s",
        "closed loop: from the end of the last of the first C requests to the sending of the last request; open loop: from "
        "one E2EL (p90) after the start to the last scheduled arrival. None where it is shorter than one request",
    ),
    Metric(
        "schedule lag",
        "ms",
        "open loop: how much later than scheduled a request was sent; a client that lags is what it measures",
    ),
    Metric(
        "peak running",
        "requests",
        "most requests in the engine's batch at one sample of the server's metrics",
    ),
    Metric("peak waiting", "requests", "most requests in the engine's queue at one sample"),
    Metric("peak KV usage", "share", "largest share of the usable KV blocks in use at one sample"),
    Metric(
        "preemptions",
        "events",
        "running requests thrown out of the KV pool to be computed again, within the cell",
    ),
    Metric(
        "prefix cache hit rate", "share", "prompt tokens found in the prefix cache / prompt tokens looked up"
    ),
)

PERCENTILES = (0.50, 0.90, 0.95, 0.99)
SUPPORT_CONFIDENCE = 0.99  # MLPerf's: p90 needs 44 values, p95 90, p99 459


@dataclass(frozen=True)
class Limits:
    """What a request must meet to be good: both, in ms."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, record: RequestRecord) -> bool:
        return ttft_s(record) * 1e3 <= self.ttft_ms and tpot_s(record) * 1e3 <= self.tpot_ms


def summarise(
    records: Sequence[RequestRecord],
    timeline: Sequence[TimelineRow],
    limits: Limits | None = None,
    *,
    repeat: int = 1,
    client_cpu_share: float | None = None,
) -> LoadLevel:
    """One closed-loop cell's figures from its records and the server samples of any period that covers it.

    `timeline` rows have `t_s` on the records' clock, the gauges `running`, `waiting`, `kv_usage` and the counters
    `preemptions_total`, `prefix_queries`, `prefix_hits`; a value may be None. Figures without samples are None. Warm-up
    requests count in throughput and failures, and in no latency. `UserInputError` when there is no record, records of
    several cells, or none of a closed loop.
    """
    if not records:
        raise UserInputError("there is no request record to summarise")
    cells = {(record.cell, record.level) for record in records}
    (cell, level), *others = cells
    if others or level is None:
        raise UserInputError(
            f"records of one closed-loop cell are needed, not of {sorted(name for name, _ in cells)}"
        )
    done = [record for record in records if record.completed]
    measured = [record for record in records if not record.warmup and record.outcome != "stopped"]
    start_s, end_s = window(records)
    duration_s = end_s - start_s
    inputs = sum(record.input_tokens or 0 for record in done)
    outputs = sum(record.output_tokens or 0 for record in done)
    inside = [row for row in timeline if start_s <= row["t_s"] <= end_s]
    good = sum(limits.met_by(record) for record in done) if limits else None
    return LoadLevel(
        cell=cell,
        repeat=repeat,
        concurrency=level,
        requests=len(records),
        warmup=sum(record.warmup for record in records),
        completed=len(done),
        failed=sum(record.failed for record in records),
        stopped=sum(record.stopped for record in records),
        duration_s=duration_s,
        input_tokens=inputs,
        output_tokens=outputs,
        output_throughput_tok_s=_rate(outputs, duration_s, done),
        total_throughput_tok_s=_rate(inputs + outputs, duration_s, done),
        request_throughput_rps=_rate(len(done), duration_s, done),
        goodput_rps=None if good is None else _rate(good, duration_s, done),
        steady=steady_window(records, limits),
        ttft=distribution([ttft_s(record) for record in measured]),
        tpot=distribution([tpot_s(record) for record in measured]),
        itl=distribution([gap for record in measured for gap in itls_s(record)]),
        itl_per_token=distribution([gap for record in measured for gap in token_itls_s(record)]),
        itl_ecdf_ms=ecdf_ms([gap for record in measured for gap in itls_s(record)]),
        e2el=distribution([e2el_s(record) for record in measured]),
        peak_running=peak(inside, "running"),
        peak_waiting=peak(inside, "waiting"),
        peak_kv_usage=peak(inside, "kv_usage"),
        preemptions=growth(timeline, "preemptions_total", start_s, end_s),
        prefix_cache_hit_rate=hit_rate(timeline, start_s, end_s),
        client_cpu_share=client_cpu_share,
    )


def steady_window(records: Sequence[RequestRecord], limits: Limits | None) -> SteadyWindow:
    """Throughput between ramp and drain; every figure None, with the reason, where there is no such window."""
    found, why = phases(records)
    if found is None:
        return SteadyWindow(note=why)
    inputs, outputs = tokens_within(records, found.ramp_end_s, found.drain_start_s)
    ended = [
        record
        for record in records
        if record.completed and found.ramp_end_s <= record.end_s < found.drain_start_s
    ]
    good = sum(limits.met_by(record) for record in ended) if limits else None
    return SteadyWindow(
        ramp_s=found.ramp_end_s - found.start_s,
        steady_s=found.steady_s,
        drain_s=found.end_s - found.drain_start_s,
        output_throughput_tok_s=outputs / found.steady_s,
        total_throughput_tok_s=(inputs + outputs) / found.steady_s,
        request_throughput_rps=len(ended) / found.steady_s,
        goodput_rps=None if good is None else good / found.steady_s,
    )


def window(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """First request sent to last request ended (completed or not), seconds on the records' clock."""
    return (min(record.start_s for record in records), max(record.end_s for record in records))


def ttft_s(record: RequestRecord) -> float:
    """Origin to first token; infinite for a failed request."""
    if not record.completed or record.ttft_s is None:
        return math.inf
    return record.start_s - record.origin_s + record.ttft_s


def e2el_s(record: RequestRecord) -> float:
    """Origin to last token; infinite for a failed request."""
    return record.end_s - record.origin_s if record.completed else math.inf


def tpot_s(record: RequestRecord) -> float:
    """(E2EL - TTFT) / (output tokens - 1); infinite for a failed request, zero where there is only one token."""
    if not record.completed:
        return math.inf
    assert record.ttft_s is not None and record.latency_s is not None and record.output_tokens is not None
    if record.output_tokens < 2:
        return 0.0
    return (record.latency_s - record.ttft_s) / (record.output_tokens - 1)


def itls_s(record: RequestRecord) -> list[float]:
    """The gaps seen; for a failed request also those that never came, each infinite (at least one)."""
    if record.completed:
        return list(record.itls_s)
    return [*record.itls_s, *_missing(record, 1 + len(record.itls_s))]


def token_itls_s(record: RequestRecord) -> list[float]:
    """Each gap once per token of its chunk, shared among them; none where the server didn't count along."""
    if not record.chunk_tokens:
        return [] if record.completed else _missing(record, 1)
    seen = [
        gap / count
        for gap, count in zip(record.itls_s, record.chunk_tokens[1:], strict=True)
        for _ in range(count)
    ]
    return seen if record.completed else [*seen, *_missing(record, sum(record.chunk_tokens))]


def _missing(record: RequestRecord, tokens_seen: int) -> list[float]:
    return [math.inf] * max(1, record.requested_output_tokens - tokens_seen)


def distribution(values_s: Sequence[float]) -> Distribution:
    """Percentiles in ms of a sample in seconds, infinities included in the ranks. An empty sample is all None.

    A percentile that the sample is too small for is None, and `needs` says how many values it takes: the number with which
    MLPerf's early stopping would let it be claimed with none above (`bounds.requests_needed` at 99 %).
    """
    n = len(values_s)
    if not n:
        return Distribution(
            n=0, mean_ms=None, p50_ms=None, p90_ms=None, p95_ms=None, p99_ms=None, max_ms=None
        )
    ordered = np.sort(np.asarray(values_s, dtype=float))
    found: dict[str, float | None] = {}
    needs: dict[str, int] = {}
    for share in PERCENTILES:
        name, wanted = f"p{share * 100:.0f}", requests_needed(share, 0, SUPPORT_CONFIDENCE)
        if n < wanted:
            needs[name] = wanted
        found[f"{name}_ms"] = _ms(percentile(ordered, share)) if n >= wanted else None
    return Distribution(
        n=n, mean_ms=_ms(float(ordered.mean())), max_ms=_ms(float(ordered[-1])), needs=needs, **found
    )


def ecdf_ms(values_s: Sequence[float]) -> list[float | None]:
    """The sample at 21 even shares from its least to its largest: a description of it, no claim about the server."""
    if not values_s:
        return []
    ordered = sorted(values_s)
    return [_ms(ordered[round(step / 20 * (len(ordered) - 1))]) for step in range(21)]


def percentile(ordered: Sequence[float] | np.ndarray, share: float) -> float:
    """Nearest-rank percentile of an ascending sample: the value of rank ceil(share * n)."""
    rank = math.ceil(
        round(share * len(ordered), 9)
    )  # 0.95 * 20 is 19.000000000000004 in floating point at some n
    return float(ordered[max(rank, 1) - 1])


def _ms(seconds: float) -> float | None:
    return seconds * 1e3 if math.isfinite(seconds) else None


def _rate(amount: int, duration_s: float, done: Sequence[RequestRecord]) -> float | None:
    return amount / duration_s if done and duration_s > 0 else None


def peak(rows: Sequence[TimelineRow], key: str) -> Any:
    """The largest known value of a gauge, None if there is none."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return max(values) if values else None


def growth(timeline: Sequence[TimelineRow], key: str, start_s: float, end_s: float) -> int | None:
    """A counter's growth between the last sample before the window and the first after it."""
    known = [row for row in timeline if row.get(key) is not None]
    before = [row for row in known if row["t_s"] <= start_s]
    after = [row for row in known if row["t_s"] >= end_s]
    if not before or not after or after[0][key] < before[-1][key]:
        return None
    return int(after[0][key] - before[-1][key])


def hit_rate(timeline: Sequence[TimelineRow], start_s: float, end_s: float) -> float | None:
    """Share of the prompt tokens looked up in the prefix cache that were found; None when none were looked up."""
    queries = growth(timeline, "prefix_queries", start_s, end_s)
    hits = growth(timeline, "prefix_hits", start_s, end_s)
    return hits / queries if queries and hits is not None else None
