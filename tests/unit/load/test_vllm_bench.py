"""The load generator's detailed result turned into records, and what is refused in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError
from pipeline.load.driver import Cell, Request, make_driver
from pipeline.load.vllm_bench import _request_lines, in_order, record_of

CELL = Cell(
    "level-2",
    (Request((1, 2, 3), 3), Request((4, 5, 6), 3), Request((7,), 2)),
    concurrency=2,
    warmup=1,
    stagger_s=0.5,
)


def event(index: int = 1, **change: Any) -> dict[str, Any]:
    return {
        "index": index,
        "scheduled": None,
        "start": 100.5,
        "latency_s": 0.7,
        "token_times": [100.8, 101.0, 101.2],
        "chunk_tokens": [1, 1, 1],
        "input_tokens": 3,
        "output_tokens": 3,
        "error": None,
        "stopped": False,
        **change,
    }


def test_record_keeps_clock_and_counts() -> None:
    record = record_of(event(), CELL, clock_offset_s=90.0)
    assert (record.cell, record.level, record.index, record.warmup) == ("level-2", 2, 1, False)
    assert record.start_s == 10.5
    assert record.ttft_s == pytest.approx(0.3)
    assert record.itls_s == pytest.approx((0.2, 0.2))
    assert (record.chunk_tokens, record.latency_s) == ((1, 1, 1), 0.7)
    assert (record.input_tokens, record.output_tokens, record.error) == (3, 3, None)
    assert record_of(event(0), CELL, 90.0).warmup
    assert record_of(event(scheduled=100.25), CELL, 90.0).scheduled_s == pytest.approx(10.25)


def test_failed_request_keeps_its_reason_and_no_counts() -> None:
    record = record_of(event(error="ClientPayloadError: cut", token_times=[], chunk_tokens=[]), CELL, 0.0)
    assert (record.error, record.outcome) == ("ClientPayloadError: cut", "failed")
    assert (record.ttft_s, record.itls_s, record.latency_s) == (None, (), 0.7)
    assert (record.input_tokens, record.output_tokens, record.requested_output_tokens) == (None, None, 3)


def test_stopped_request_is_no_failure() -> None:
    record = record_of(
        event(stopped=True, token_times=[100.8], chunk_tokens=[1], output_tokens=None), CELL, 0.0
    )
    assert (record.outcome, record.error) == ("stopped", None)
    assert record.ttft_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"input_tokens": 4},
            "request 1: 3 in and 3 out were sent and asked for, the server counted 4 in and 3 out",
        ),
        ({"output_tokens": 2}, "request 1: .* 3 in and 2 out"),
        ({"chunk_tokens": [1, 1, 2]}, "request 1: its chunks carried 4 tokens, the server counted 3"),
        (
            {"chunk_tokens": [], "token_times": [1.0, 2.0, 3.0, 4.0]},
            "request 1 came in 4 chunks with text for 3 tokens",
        ),
    ],
)
def test_untrustworthy_counts_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineFailedError, match=named):
        record_of(event(**change), CELL, 0.0)


def test_every_request_is_accounted_for_unless_stopped() -> None:
    records = [record_of(event(1), CELL, 0.0), record_of(event(0), CELL, 0.0)]
    with pytest.raises(EngineFailedError, match="accounts for 2 of the 3 requests of level-2"):
        in_order(records, CELL, stopped=False)
    assert [record.index for record in in_order(records, CELL, stopped=True)] == [0, 1]


def test_fewer_chunks_than_tokens_are_fine() -> None:
    record = record_of(event(token_times=[100.8, 101.2], chunk_tokens=[1, 2]), CELL, 0.0)
    assert (record.itls_s, record.chunk_tokens) == ((pytest.approx(0.4),), (1, 2))
    assert record_of(event(token_times=[100.8, 101.2], chunk_tokens=[]), CELL, 0.0).chunk_tokens == ()


def test_only_the_first_wave_is_staggered() -> None:
    times = [json.loads(line)["at_s"] for line in _request_lines(CELL).splitlines()]
    assert times == [0.0, 0.5, 0.5]  # the third waits for a free stream, not for a time
    scheduled = replace(CELL, concurrency=None, arrivals_s=(0.1, 0.4, 2.0))
    assert [json.loads(line)["at_s"] for line in _request_lines(scheduled).splitlines()] == [0.1, 0.4, 2.0]


@pytest.mark.parametrize(
    "change",
    [{"arrivals_s": (0.0, 1.0, 2.0)}, {"concurrency": None}, {"concurrency": None, "arrivals_s": (0.0,)}],
)
def test_a_cell_is_either_a_closed_or_an_open_loop(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cell level-2"):
        replace(CELL, **change)


def test_unknown_driver_and_missing_environment(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"load\.driver 'wrk'"):
        make_driver("wrk", "python")
    with (
        pytest.raises(EnvironmentUnfitError, match="make environments"),
        make_driver("vllm-bench", tmp_path / "python").session(tmp_path / "logs"),
    ):
        pass
    assert not (tmp_path / "logs").exists()
