"""Figures from synthetic records whose truth is known by construction."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pipeline.errors import UserInputError
from pipeline.load.metrics import METRICS, Limits, distribution, e2el_s, summarise, tpot_s, ttft_s, window
from tests.support.load_records import failed, record


def row(t_s: float, **values: float | None) -> dict[str, float | None]:
    names = ("running", "waiting", "kv_usage", "preemptions_total", "prefix_queries", "prefix_hits")
    return {"t_s": t_s, **dict.fromkeys(names), **values}


def test_latencies_and_throughput() -> None:
    """Nine requests of known times; with nine only the median can be claimed."""
    records = [record(index, 10.0 + index / 10, 0.1 * (index + 1), 0.01 * (index + 1)) for index in range(9)]
    level = summarise(records, [])
    assert (level.requests, level.completed, level.failed) == (9, 9, 0)
    assert (level.input_tokens, level.output_tokens) == (900, 45)
    duration_s = 0.8 + 0.9 + 4 * 0.09
    assert level.duration_s == pytest.approx(duration_s)
    assert level.output_throughput_tok_s == pytest.approx(45 / duration_s)
    assert level.total_throughput_tok_s == pytest.approx(945 / duration_s)
    assert level.request_throughput_rps == pytest.approx(9 / duration_s)
    assert level.ttft.p50_ms == pytest.approx(500)
    assert level.ttft.max_ms == pytest.approx(900)
    assert level.ttft.mean_ms == pytest.approx(500)
    assert level.tpot.p50_ms == pytest.approx(50)
    assert (level.itl.n, level.itl.p50_ms) == (36, pytest.approx(50))
    assert level.e2el.p50_ms == pytest.approx(700)


def test_goodput_counts_what_meets_both_limits() -> None:
    slow_first, slow_later = record(1, 0.0, 2.5, 0.01), record(2, 0.0, 0.1, 0.2)
    records = [
        record(0, 0.0, 0.1, 0.01),
        slow_first,
        slow_later,
        failed(record(3, 0.0, 0.1, 0.01), after_s=4.0),
    ]
    level = summarise(records, [], Limits(ttft_ms=2000, tpot_ms=100))
    assert level.goodput_rps == pytest.approx(1 / 4.0)
    assert level.request_throughput_rps == pytest.approx(3 / 4.0)
    assert summarise(records, []).goodput_rps is None


def test_itl_per_chunk_and_per_token() -> None:
    """Nine tokens in five chunks of 1, 2, 2, 2, 2: TPOT and the token gaps are half of the chunk gaps."""
    joined = dataclasses.replace(
        record(0, 0.0, 0.5, 0.2), output_tokens=9, requested_output_tokens=9, chunk_tokens=(1, 2, 2, 2, 2)
    )
    level = summarise([dataclasses.replace(joined, index=index) for index in range(7)], [])
    assert level.tpot.p50_ms == pytest.approx(100)
    assert (level.itl.n, level.itl.p50_ms) == (7 * 4, pytest.approx(200))
    assert level.itl_per_token is not None
    assert (level.itl_per_token.n, level.itl_per_token.p50_ms) == (7 * 8, pytest.approx(100))


def test_open_loop_latency_counts_from_the_schedule() -> None:
    late = record(0, 10.4, 0.5, 0.1, level=None, scheduled_s=10.0)
    assert ttft_s(late) == pytest.approx(0.9)
    assert e2el_s(late) == pytest.approx(1.3)
    assert tpot_s(late) == pytest.approx(0.1)


def test_warm_up_is_in_the_throughput_and_in_no_latency() -> None:
    records = [record(index, 0.0, 9.0, 0.1, warmup=True) for index in range(2)]
    records += [record(2 + index, 9.4, 0.5, 0.1) for index in range(7)]
    level = summarise(records, [])
    assert (level.requests, level.warmup, level.completed) == (9, 2, 9)
    assert (level.ttft.n, level.ttft.max_ms) == (7, pytest.approx(500))
    assert level.output_throughput_tok_s == pytest.approx(45 / 10.3)


def test_stopped_requests_are_neither_failures_nor_latencies() -> None:
    cut = dataclasses.replace(failed(record(9, 1.0, 0.5, 0.1)), error=None, stopped=True)
    level = summarise([*(record(index, 0.0, 0.5, 0.1) for index in range(9)), cut], [])
    assert (level.requests, level.completed, level.failed, level.stopped) == (10, 9, 0, 1)
    assert (level.ttft.n, level.ttft.max_ms) == (9, pytest.approx(500))


@pytest.mark.parametrize(
    ("n", "p50", "p90", "p95", "p99", "needs"),
    [
        (6, None, None, None, None, {"p50": 7, "p90": 44, "p95": 90, "p99": 459}),
        (20, 10, None, None, None, {"p90": 44, "p95": 90, "p99": 459}),
        (44, 22, 40, None, None, {"p95": 90, "p99": 459}),
        (458, 229, 413, 436, None, {"p99": 459}),
        (1000, 500, 900, 950, 990, {}),
    ],
)
def test_percentiles_are_nearest_rank_or_refused(
    n: int, p50: int | None, p90: int | None, p95: int | None, p99: int | None, needs: dict[str, int]
) -> None:
    """What it takes is MLPerf's early stopping at 99 % with none over the limit: 44, 90 and 459 for p90, p95 and p99."""
    values = [rank / 1e3 for rank in range(1, n + 1)]
    random.Random(0).shuffle(values)
    found = distribution(values)
    assert [found.p50_ms, found.p90_ms, found.p95_ms, found.p99_ms] == [
        None if value is None else pytest.approx(value) for value in (p50, p90, p95, p99)
    ]
    assert found.needs == needs


def test_failed_requests_are_infinitely_late_and_never_dropped() -> None:
    records = [record(index, float(index), 0.5, 0.1) for index in range(100)]
    for index in range(6):
        records[index * 9] = failed(records[index * 9])
    level = summarise(records, [])
    assert (level.requests, level.completed, level.failed) == (100, 94, 6)
    for found in (level.ttft, level.tpot, level.e2el):
        assert found.n == 100
        assert found.p90_ms is not None
        assert (found.p95_ms, found.max_ms, found.mean_ms) == (None, None, None)  # infinite, not refused
        assert found.needs == {"p99": 459}
    assert level.output_tokens == 470
    assert level.request_throughput_rps == pytest.approx(94 / level.duration_s)


def test_gaps_of_a_failed_request_that_never_came_count_as_infinite() -> None:
    broken = failed(record(1, 0.0, 0.5, 0.1, tokens=50), gaps_seen=40)
    level = summarise([record(0, 0.0, 0.5, 0.1, tokens=50), broken], [])
    for found in (level.itl, level.itl_per_token):
        assert found is not None
        assert found.n == 98  # 49 and 40 seen, 9 that never came
        assert found.p90_ms == pytest.approx(100)
        assert found.p95_ms is None and "p95" not in found.needs


def test_a_level_in_which_everything_failed_has_no_speed() -> None:
    level = summarise([failed(record(0, 0.0, 0.5, 0.1))], [])
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
    level = summarise(records, timeline)
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
    level = summarise(records, timeline)
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
    level = summarise([record(0, 10.0, 0.5, 0.5)], timeline)
    assert (level.peak_running, level.peak_waiting, level.peak_kv_usage) == (None, None, None)
    assert (level.preemptions, level.prefix_cache_hit_rate) == (None, None)


def test_prefix_cache_that_is_off_has_no_hit_rate() -> None:
    timeline = [row(9.0, prefix_queries=0.0, prefix_hits=0.0), row(13.0, prefix_queries=0.0, prefix_hits=0.0)]
    assert summarise([record(0, 10.0, 0.5, 0.5)], timeline).prefix_cache_hit_rate is None


def test_wrong_records_are_refused() -> None:
    with pytest.raises(UserInputError, match="no request record"):
        summarise([], [])
    with pytest.raises(UserInputError, match="one closed-loop cell"):
        summarise([record(0, 0.0, 0.5, 0.1), record(0, 0.0, 0.5, 0.1, cell="other")], [])
    with pytest.raises(UserInputError, match="one closed-loop cell"):
        summarise([record(0, 0.0, 0.5, 0.1, level=None, scheduled_s=0.0)], [])


def test_every_metric_is_defined_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.definition for metric in METRICS)
