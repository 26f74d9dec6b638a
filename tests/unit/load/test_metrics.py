"""Figures from synthetic records whose truth is known by construction."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pipeline.errors import UserInputError
from pipeline.load.metrics import METRICS, distribution, summarise, window
from pipeline.load.records import RequestRecord


def record(
    index: int, start_s: float, ttft_s: float, gap_s: float, *, tokens: int = 5, level: int = 2
) -> RequestRecord:
    """A request with even gaps."""
    gaps = (gap_s,) * (tokens - 1)
    return RequestRecord(level, index, start_s, ttft_s, gaps, ttft_s + sum(gaps), 100, tokens, tokens, None)


def failed(source: RequestRecord, gaps_seen: int = 0, after_s: float = 1.0) -> RequestRecord:
    """The same request, broken off."""
    return dataclasses.replace(
        source,
        ttft_s=source.ttft_s if gaps_seen else None,
        itls_s=source.itls_s[:gaps_seen],
        latency_s=after_s,
        input_tokens=None,
        output_tokens=None,
        error="ClientPayloadError: cut",
    )


def row(t_s: float, **values: float | None) -> dict[str, float | None]:
    names = ("running", "waiting", "kv_usage", "preemptions_total", "prefix_queries", "prefix_hits")
    return {"t_s": t_s, **dict.fromkeys(names), **values}


def test_latencies_and_throughput() -> None:
    level = summarise(
        [record(0, 10.0, 0.5, 0.1), record(1, 10.2, 0.7, 0.2), record(2, 11.0, 0.6, 0.3)], [], 2
    )
    assert (level.requests, level.completed, level.failed) == (3, 3, 0)
    assert (level.input_tokens, level.output_tokens) == (300, 15)
    assert level.duration_s == pytest.approx(2.8)  # 10.0 to 11.0 + 0.6 + 4 * 0.3
    assert level.output_throughput_tok_s == pytest.approx(15 / 2.8)
    assert level.total_throughput_tok_s == pytest.approx(315 / 2.8)
    assert level.request_throughput_rps == pytest.approx(3 / 2.8)
    assert level.ttft.p50_ms == pytest.approx(600)
    assert level.ttft.max_ms == pytest.approx(700)
    assert level.ttft.mean_ms == pytest.approx(600)
    assert level.tpot.p50_ms == pytest.approx(200)
    assert (level.itl.n, level.itl.p50_ms, level.itl.p99_ms) == (12, pytest.approx(200), pytest.approx(300))
    assert level.e2el.p50_ms == pytest.approx(1500)


def test_tpot_is_per_token_where_chunks_hold_several() -> None:
    """Nine tokens in five chunks: TPOT divides by the eight tokens after the first, ITL by the chunks seen."""
    joined = dataclasses.replace(
        record(0, 0.0, 0.5, 0.2, tokens=5), output_tokens=9, requested_output_tokens=9
    )
    level = summarise([joined], [], 2)
    assert level.tpot.p50_ms == pytest.approx(100)
    assert (level.itl.n, level.itl.p50_ms) == (4, pytest.approx(200))


@pytest.mark.parametrize(
    ("n", "p50", "p90", "p95", "p99"),
    [(1, 1, 1, 1, 1), (4, 2, 4, 4, 4), (20, 10, 18, 19, 20), (1000, 500, 900, 950, 990)],
)
def test_percentiles_are_nearest_rank(n: int, p50: int, p90: int, p95: int, p99: int) -> None:
    values = [rank / 1e3 for rank in range(1, n + 1)]
    random.Random(0).shuffle(values)
    found = distribution(values)
    assert [found.p50_ms, found.p90_ms, found.p95_ms, found.p99_ms] == pytest.approx([p50, p90, p95, p99])


def test_failed_requests_are_infinitely_late_and_never_dropped() -> None:
    records = [record(index, float(index), 0.5, 0.1) for index in range(10)]
    records[3] = failed(records[3])
    level = summarise(records, [], 2)
    assert (level.requests, level.completed, level.failed) == (10, 9, 1)
    for found in (level.ttft, level.tpot, level.e2el):
        assert found.n == 10
        assert found.p90_ms is not None
        assert (found.p95_ms, found.p99_ms, found.max_ms, found.mean_ms) == (None, None, None, None)
    assert level.output_tokens == 45
    assert level.request_throughput_rps == pytest.approx(9 / level.duration_s)


def test_gaps_of_a_failed_request_that_never_came_count_as_infinite() -> None:
    level = summarise(
        [record(0, 0.0, 0.5, 0.1, tokens=5), failed(record(1, 0.0, 0.5, 0.1, tokens=5), gaps_seen=1)], [], 2
    )
    assert level.itl.n == 8
    assert level.itl.p50_ms == pytest.approx(100)  # 5 of 8 are finite
    assert level.itl.p90_ms is None


def test_a_level_in_which_everything_failed_has_no_speed() -> None:
    level = summarise([failed(record(0, 0.0, 0.5, 0.1))], [], 2)
    assert (level.completed, level.failed, level.output_tokens) == (0, 1, 0)
    assert level.output_throughput_tok_s is None
    assert level.request_throughput_rps is None
    assert level.ttft.p50_ms is None


def test_window_covers_failed_requests() -> None:
    records = [record(0, 5.0, 0.5, 0.1), failed(record(1, 5.1, 0.5, 0.1), after_s=30.0)]
    assert window(records) == pytest.approx((5.0, 35.1))


def test_peaks_come_from_the_levels_own_samples() -> None:
    records = [record(0, 10.0, 0.5, 0.5)]  # until 12.5
    timeline = [
        row(9.0, running=50.0, waiting=60.0, kv_usage=1.0),
        row(11.0, running=3.0, waiting=0.0, kv_usage=0.4),
        row(12.0, running=5.0, waiting=2.0, kv_usage=0.6),
        row(13.0, running=70.0, waiting=80.0, kv_usage=0.9),
    ]
    level = summarise(records, timeline, 2)
    assert (level.peak_running, level.peak_waiting, level.peak_kv_usage) == (5, 2, 0.6)


def test_counters_grow_from_the_sample_before_to_the_sample_after() -> None:
    records = [record(0, 10.0, 0.5, 0.5)]
    timeline = [
        row(8.0, preemptions_total=1.0, prefix_queries=0.0, prefix_hits=0.0),
        row(9.0, preemptions_total=2.0, prefix_queries=100.0, prefix_hits=90.0),
        row(11.0, preemptions_total=4.0, prefix_queries=200.0, prefix_hits=90.0),
        row(13.0, preemptions_total=7.0, prefix_queries=500.0, prefix_hits=94.0),
        row(14.0, preemptions_total=9.0, prefix_queries=900.0, prefix_hits=494.0),
    ]
    level = summarise(records, timeline, 2)
    assert level.preemptions == 5
    assert level.prefix_cache_hit_rate == pytest.approx(4 / 400)


@pytest.mark.parametrize(
    "timeline",
    [
        [],
        [row(11.0)],
        [row(9.0, preemptions_total=1.0, prefix_queries=1.0, prefix_hits=0.0)],  # nothing after
        [row(13.0, preemptions_total=1.0, prefix_queries=1.0, prefix_hits=0.0)],  # nothing before
        [
            row(9.0, preemptions_total=5.0, prefix_queries=9.0),
            row(13.0, preemptions_total=1.0, prefix_queries=2.0),
        ],  # reset
    ],
)
def test_what_the_server_did_not_tell_is_none(timeline: list[dict[str, float | None]]) -> None:
    level = summarise([record(0, 10.0, 0.5, 0.5)], timeline, 2)
    assert (level.peak_running, level.peak_waiting, level.peak_kv_usage) == (None, None, None)
    assert (level.preemptions, level.prefix_cache_hit_rate) == (None, None)


def test_prefix_cache_that_is_off_has_no_hit_rate() -> None:
    timeline = [row(9.0, prefix_queries=0.0, prefix_hits=0.0), row(13.0, prefix_queries=0.0, prefix_hits=0.0)]
    assert summarise([record(0, 10.0, 0.5, 0.5)], timeline, 2).prefix_cache_hit_rate is None


def test_wrong_records_are_refused() -> None:
    with pytest.raises(UserInputError, match="no request record for concurrency 4"):
        summarise([], [], 4)
    with pytest.raises(UserInputError, match="other levels"):
        summarise([record(0, 0.0, 0.5, 0.1, level=2)], [], 4)


def test_every_metric_is_defined_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.definition for metric in METRICS)
