"""The load generator's detailed result turned into records, and what is refused in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError
from pipeline.load.driver import Cell, make_driver
from pipeline.load.vllm_bench import records_from_bench

CELL = Cell("level-2", 2, prompts=((1, 2, 3), (4, 5, 6)), output_tokens=3)


def raw(**change: Any) -> dict[str, Any]:
    return {
        "start_times": [100.0, 100.5],
        "ttfts": [0.2, 0.3],
        "itls": [[0.1, 0.1], [0.2, 0.2]],
        "latencies": [0.4, 0.7],
        "input_lens": [3, 3],
        "output_lens": [3, 3],
        "errors": ["", ""],
        **change,
    }


def test_records_keep_order_and_clock() -> None:
    first, second = records_from_bench(raw(), CELL, clock_offset_s=90.0)
    assert (first.level, first.index, second.index) == (2, 0, 1)
    assert (first.start_s, second.start_s) == (10.0, 10.5)
    assert (second.ttft_s, second.itls_s, second.latency_s) == (0.3, (0.2, 0.2), 0.7)
    assert (first.input_tokens, first.output_tokens, first.error) == (3, 3, None)


def test_failed_request_keeps_its_reason_and_no_counts() -> None:
    trace = "Traceback (most recent call last):\n  File x\naiohttp.ClientPayloadError: cut\n"
    changed = raw(errors=["", trace], ttfts=[0.2, 0.0], itls=[[0.1, 0.1], []], output_lens=[3, 0])
    _, second = records_from_bench(changed, CELL, 0.0)
    assert second.error == "aiohttp.ClientPayloadError: cut"
    assert (second.ttft_s, second.itls_s, second.latency_s) == (None, (), 0.7)
    assert (second.input_tokens, second.output_tokens, second.requested_output_tokens) == (None, None, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"input_lens": [3, 4]},
            "request 1: 3 in and 3 out were sent and asked for, the server counted 4 in and 3 out",
        ),
        ({"output_lens": [2, 3], "itls": [[0.1], [0.2, 0.2]]}, "request 0: .* 3 in and 2 out"),
        ({"itls": [[0.1, 0.1, 0.1], [0.2, 0.2]]}, "request 0 came in 4 chunks for 3 tokens"),
        ({"errors": [""]}, "doesn't hold 2 requests"),
    ],
)
def test_untrustworthy_results_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineFailedError, match=named):
        records_from_bench(raw(**change), CELL, 0.0)


def test_fewer_chunks_than_tokens_are_fine() -> None:
    first, _ = records_from_bench(raw(itls=[[0.2], [0.2, 0.2]]), CELL, 0.0)
    assert first.itls_s == (0.2,)


def test_unknown_driver_and_missing_environment(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"load\.driver 'wrk'"):
        make_driver("wrk", "python")
    with (
        pytest.raises(EnvironmentUnfitError, match="make environments"),
        make_driver("vllm-bench", tmp_path / "python").session(tmp_path / "logs"),
    ):
        pass
    assert not (tmp_path / "logs").exists()
