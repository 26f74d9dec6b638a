"""Request records and server samples in, one level's figures out. Pure: the report and the tests recompute with it.

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
from pipeline.load.records import RequestRecord
from pipeline.results import Distribution, LoadLevel

TimelineRow = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """A metric's name, unit and the sentence that defines it."""

    name: str
    unit: str
    definition: str


METRICS = (
    Metric(
        "TTFT", "ms", "time to first token: request sent to first streamed chunk, the server's queue included"
    ),
    Metric(
        "ITL", "ms", "inter-token latency: gap between two successive chunks of one request; all gaps pooled"
    ),
    Metric(
        "TPOT",
        "ms",
        "time per output token after the first: (E2EL - TTFT) / (output tokens - 1), per request",
    ),
    Metric("E2EL", "ms", "end-to-end latency: request sent to last chunk"),
    Metric(
        "output throughput",
        "tok/s",
        "output tokens of completed requests / (first request sent to last request ended)",
    ),
    Metric("total throughput", "tok/s", "input and output tokens of completed requests over the same time"),
    Metric("request throughput", "req/s", "completed requests over the same time"),
    Metric(
        "peak running", "requests", "most requests in the engine's batch at one sample, taken once a second"
    ),
    Metric("peak waiting", "requests", "most requests in the engine's queue at one sample"),
    Metric("peak KV usage", "share", "largest share of the usable KV blocks in use at one sample"),
    Metric(
        "preemptions",
        "events",
        "running requests thrown out of the KV pool to be computed again, within the level",
    ),
    Metric(
        "prefix cache hit rate", "share", "prompt tokens found in the prefix cache / prompt tokens looked up"
    ),
)


def summarise(
    records: Sequence[RequestRecord], timeline: Sequence[TimelineRow], concurrency: int
) -> LoadLevel:
    """One level's figures from its records and the server samples of any period that covers it.

    `timeline` rows have `t_s` on the records' clock, the gauges `running`, `waiting`, `kv_usage` and the counters
    `preemptions_total`, `prefix_queries`, `prefix_hits`; a value may be None. Figures without samples are None.
    `UserInputError` when there is no record or one of another level.
    """
    if not records:
        raise UserInputError(f"there is no request record for concurrency {concurrency}")
    if any(record.level != concurrency for record in records):
        raise UserInputError(f"records of other levels are mixed into concurrency {concurrency}")
    done = [record for record in records if record.completed]
    start_s, end_s = window(records)
    duration_s = end_s - start_s
    inputs = sum(record.input_tokens or 0 for record in done)
    outputs = sum(record.output_tokens or 0 for record in done)
    inside = [row for row in timeline if start_s <= row["t_s"] <= end_s]
    return LoadLevel(
        concurrency=concurrency,
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        duration_s=duration_s,
        input_tokens=inputs,
        output_tokens=outputs,
        output_throughput_tok_s=_rate(outputs, duration_s, done),
        total_throughput_tok_s=_rate(inputs + outputs, duration_s, done),
        request_throughput_rps=_rate(len(done), duration_s, done),
        ttft=distribution([_ttft_s(record) for record in records]),
        tpot=distribution([tpot_s(record) for record in records]),
        itl=distribution([gap for record in records for gap in _itls_s(record)]),
        e2el=distribution([_e2el_s(record) for record in records]),
        peak_running=_peak(inside, "running"),
        peak_waiting=_peak(inside, "waiting"),
        peak_kv_usage=_peak(inside, "kv_usage"),
        preemptions=_growth(timeline, "preemptions_total", start_s, end_s),
        prefix_cache_hit_rate=_hit_rate(timeline, start_s, end_s),
    )


def window(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """First request sent to last request ended (completed or failed), seconds on the records' clock."""
    return (
        min(record.start_s for record in records),
        max(record.start_s + (record.latency_s or 0.0) for record in records),
    )


def tpot_s(record: RequestRecord) -> float:
    """(E2EL - TTFT) / (output tokens - 1); infinite for a failed request, zero where there is only one token."""
    if not record.completed:
        return math.inf
    assert record.ttft_s is not None and record.latency_s is not None and record.output_tokens is not None
    if record.output_tokens < 2:
        return 0.0
    return (record.latency_s - record.ttft_s) / (record.output_tokens - 1)


def distribution(values_s: Sequence[float]) -> Distribution:
    """Percentiles in ms of a sample in seconds, infinities included in the ranks. An empty sample is all None."""
    if not values_s:
        return Distribution(
            n=0, mean_ms=None, p50_ms=None, p90_ms=None, p95_ms=None, p99_ms=None, max_ms=None
        )
    ordered = np.sort(np.asarray(values_s, dtype=float))
    return Distribution(
        n=len(ordered),
        mean_ms=_ms(float(ordered.mean())),
        p50_ms=_ms(percentile(ordered, 0.50)),
        p90_ms=_ms(percentile(ordered, 0.90)),
        p95_ms=_ms(percentile(ordered, 0.95)),
        p99_ms=_ms(percentile(ordered, 0.99)),
        max_ms=_ms(float(ordered[-1])),
    )


def percentile(ordered: Sequence[float] | np.ndarray, share: float) -> float:
    """Nearest-rank percentile of an ascending sample: the value of rank ceil(share * n)."""
    rank = math.ceil(
        round(share * len(ordered), 9)
    )  # 0.95 * 20 is 19.000000000000004 in floating point at some n
    return float(ordered[max(rank, 1) - 1])


def _ttft_s(record: RequestRecord) -> float:
    return record.ttft_s if record.completed and record.ttft_s is not None else math.inf


def _e2el_s(record: RequestRecord) -> float:
    return record.latency_s if record.completed and record.latency_s is not None else math.inf


def _itls_s(record: RequestRecord) -> list[float]:
    """The gaps seen; for a failed request also those that never came, each infinite (at least one)."""
    if record.completed:
        return list(record.itls_s)
    missing = max(1, record.requested_output_tokens - 1 - len(record.itls_s))
    return [*record.itls_s, *[math.inf] * missing]


def _ms(seconds: float) -> float | None:
    return seconds * 1e3 if math.isfinite(seconds) else None


def _rate(amount: int, duration_s: float, done: Sequence[RequestRecord]) -> float | None:
    return amount / duration_s if done and duration_s > 0 else None


def _peak(rows: Sequence[TimelineRow], key: str) -> Any:
    values = [row[key] for row in rows if row.get(key) is not None]
    return max(values) if values else None


def _growth(timeline: Sequence[TimelineRow], key: str, start_s: float, end_s: float) -> int | None:
    """A counter's growth between the last sample before the window and the first after it."""
    known = [row for row in timeline if row.get(key) is not None]
    before = [row for row in known if row["t_s"] <= start_s]
    after = [row for row in known if row["t_s"] >= end_s]
    if not before or not after or after[0][key] < before[-1][key]:
        return None
    return int(after[0][key] - before[-1][key])


def _hit_rate(timeline: Sequence[TimelineRow], start_s: float, end_s: float) -> float | None:
    queries = _growth(timeline, "prefix_queries", start_s, end_s)
    hits = _growth(timeline, "prefix_hits", start_s, end_s)
    return hits / queries if queries and hits is not None else None
