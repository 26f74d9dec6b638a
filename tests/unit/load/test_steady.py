"""Ramp, steady window and drain on synthetic traces whose phases and rates are known."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.load.metrics import Limits, summarise
from pipeline.load.steady import phases, token_arrivals, tokens_within
from tests.support.load_records import closed_loop, failed, record


def test_closed_loop_phases_are_where_they_were_put() -> None:
    """Four streams, requests of 2 s staggered by 0.5 s, 24 of them: sent at 0, 0.5 … 11.5."""
    found, _ = phases(closed_loop(4, 24, ttft_s=1.2, gap_s=0.2))
    assert found is not None
    assert (found.start_s, found.ramp_end_s, found.drain_start_s, found.end_s) == pytest.approx(
        (0, 3.5, 11.5, 13.5)
    )


def test_steady_throughput_is_the_true_rate_and_the_whole_runs_is_not() -> None:
    """Four streams of 5 tokens per 2 s make 10 tok/s; ramp and drain pull the whole run's figure below it."""
    level = summarise(closed_loop(4, 24, ttft_s=1.2, gap_s=0.2), [], Limits(2000, 300))
    assert level.steady is not None
    assert level.steady.output_throughput_tok_s == pytest.approx(
        10, rel=0.03
    )  # 8 s of window, tokens are whole
    assert level.steady.request_throughput_rps == pytest.approx(2, rel=0.07)
    assert level.steady.goodput_rps == level.steady.request_throughput_rps
    assert level.output_throughput_tok_s == pytest.approx(24 * 5 / 13.5)
    assert level.output_throughput_tok_s < 9


def test_a_slow_first_wave_is_ramp() -> None:
    """The first four start together and take 6 s, for their prefills collide; what follows takes 2 s."""
    first = [record(index, 0.0, 5.2, 0.2, level=4) for index in range(4)]
    later = [
        record(4 + index, 6.0 + index // 4 * 2 + index % 4 * 0.5, 1.2, 0.2, level=4) for index in range(20)
    ]
    found, _ = phases(first + later)
    assert found is not None
    assert (found.ramp_end_s, found.drain_start_s) == pytest.approx((6.0, 15.5))
    level = summarise(first + later, [])
    assert level.steady is not None
    assert level.steady.output_throughput_tok_s == pytest.approx(
        10, rel=0.11
    )  # the first 1.2 s make no token
    assert level.output_throughput_tok_s == pytest.approx(120 / 17.5)


def test_too_few_requests_have_no_steady_window_and_say_so() -> None:
    found, why = phases(closed_loop(4, 8, ttft_s=1.2, gap_s=0.2))
    assert found is None and "more than 8 are needed" in why
    found, why = phases(closed_loop(4, 10, ttft_s=1.2, gap_s=0.2))
    assert found is None and "less than one request's 2.0 s" in why
    level = summarise(closed_loop(4, 8, ttft_s=1.2, gap_s=0.2), [])
    assert level.steady is not None and level.steady.output_throughput_tok_s is None
    assert "needed" in (level.steady.note or "")
    assert level.output_throughput_tok_s is not None


def test_nothing_completed_has_no_steady_window() -> None:
    found, why = phases([failed(record(0, 0.0, 0.5, 0.1))])
    assert found is None and why == "no request completed"


def test_open_loop_phases_follow_the_schedule() -> None:
    """Arrivals once a second, each takes 2 s and is sent 0.1 s late: 2.1 s from its schedule, which is the ramp."""
    records = [
        record(index, index + 0.1, 1.2, 0.2, level=None, scheduled_s=float(index)) for index in range(20)
    ]
    found, _ = phases(records)
    assert found is not None
    assert (found.start_s, found.ramp_end_s, found.drain_start_s) == pytest.approx((0, 2.1, 19))
    assert found.end_s == pytest.approx(21.1)


def test_tokens_count_when_they_arrive() -> None:
    """Tokens at 1.0, 1.5 and 2.0; the prompt counts with the first."""
    one = record(0, 0.0, 1.0, 0.5, tokens=3)
    assert tokens_within([one], 0.0, 1.0) == (0, 0)
    assert tokens_within([one], 1.0, 1.6) == (100, 2)
    assert tokens_within([one], 1.6, 9.0) == (0, 1)


def test_tokens_of_a_chunk_arrive_together() -> None:
    joined = dataclasses.replace(record(0, 0.0, 1.0, 0.5, tokens=3), chunk_tokens=(1, 4, 2), output_tokens=7)
    assert token_arrivals(joined) == [(1.0, 1), (1.5, 4), (2.0, 2)]
    uncounted = dataclasses.replace(joined, chunk_tokens=())
    assert token_arrivals(uncounted) == [(1.0, 2), (1.5, 2), (2.0, 3)]
    assert token_arrivals(dataclasses.replace(joined, ttft_s=None)) == []
