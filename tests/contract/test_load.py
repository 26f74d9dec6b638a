"""vLLM's real load generator, in its own environment, against the mock server: what is measured is what was scripted."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.errors import EngineFailedError
from pipeline.load.driver import CellResult, LoadSession, Request, Target
from pipeline.load.metrics import Limits, distribution, itls_s, summarise, tpot_s, ttft_s
from pipeline.load.search import Axis
from pipeline.load.slo import SearchPlan, Slo, arrivals, probe_result
from pipeline.results import LoadLevel
from tests.support.environments import environment_python
from tests.support.load_cells import TOKENS, Seen, closed_cell, run_cell
from tests.support.mock_vllm import REPOSITORY, start_mock
from tests.support.scripted_times import SCRIPTS, Script, run_script

TTFT_S, ITL_S = 0.2, 0.02
CLOCK_S = 0.001  # two processes, one clock, and the rounding of a sleep
SLACK_S = 0.2  # of a shared two-core machine that runs client and mock at once
SLO = Slo(Limits(ttft_ms=500, tpot_ms=60), percentile=0.8, confidence=0.9)


def figures(result: CellResult) -> LoadLevel:
    return summarise(result.records, [])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.streams}-streams")
def test_every_request_has_the_times_of_its_own_script(
    session: LoadSession, model: Path, script: Script
) -> None:
    """No request ends before its script does, and each is nearer to its own than a mix-up would leave it.

    Only lower bounds are sharp: a busy machine delivers late, never early. TPOT is a difference of two times, so a first
    token that came late takes from it what E2EL doesn't show; `make bench` holds all three to 1 ms + 1 %.
    """
    found = run_script(session, model, script)
    assert all(record.completed for record in found.result.records)
    late = {
        metric: [m - s for m, s in zip(measured, found.scripted[metric], strict=True)]
        for metric, measured in found.measured.items()
    }
    gaps = script.tokens - 1
    for first, end, gap in zip(late["TTFT"], late["E2EL"], late["TPOT"], strict=True):
        assert min(first, end) > -CLOCK_S
        assert gap == pytest.approx((end - first) / gaps, abs=CLOCK_S)
    for metric in ("TTFT", "E2EL"):
        assert statistics.median(late[metric]) < 0.25 * min(found.scripted[metric]) + SLACK_S, metric
    level = figures(found.result)
    sent = len(found.result.records)
    assert (level.input_tokens, level.output_tokens) == (100 * sent, script.tokens * sent)
    assert (level.itl.n, level.ttft.n) == ((script.tokens - 1) * script.requests, script.requests)


def test_each_prompt_is_sent_once_as_it_was_drawn(session: LoadSession, model: Path) -> None:
    with start_mock() as mock:
        result = run_cell(session, mock, closed_cell(model, 4, 12))
        bodies = list(mock.requests)
    assert sorted(tuple(body["prompt"]) for body in bodies) == sorted(r.prompt for r in result.cell.requests)
    for body in bodies:
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (TOKENS, 0, True)
        assert (body["model"], body["stream"]) == ("demo", True)


def test_each_request_may_have_a_length_of_its_own(session: LoadSession, model: Path) -> None:
    cell = closed_cell(model, 2, 4)
    lengths = [(30, 4), (7, 9), (200, 2), (1, 30)]
    own = tuple(Request(cell.requests[i].prompt[:1] * n, out) for i, (n, out) in enumerate(lengths))
    with start_mock() as mock:
        result = run_cell(session, mock, replace(cell, requests=own))
    assert [(record.input_tokens, record.output_tokens) for record in result.records] == lengths


def test_warm_up_runs_into_the_measured_requests_without_a_drain(session: LoadSession, model: Path) -> None:
    """Eight streams of 0.5 s: between the first end of the warm-up and the last start there are always eight in flight."""
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S) as mock:
        result = run_cell(session, mock, closed_cell(model, 8, 40, warmup=8, stagger_s=0.05))
    records = sorted(result.records, key=lambda record: record.start_s)
    assert [record.warmup for record in records] == [True] * 8 + [False] * 32
    for later in records[8:]:
        in_flight = sum(r.start_s <= later.start_s < r.end_s for r in records if r is not later)
        assert in_flight >= 6  # its own slot is free, and one more may be handing over
    level = figures(result)
    assert level.steady is not None and level.steady.steady_s is not None
    service_s = TTFT_S + (TOKENS - 1) * ITL_S
    assert level.steady.output_throughput_tok_s == pytest.approx(8 * TOKENS / service_s, rel=0.3)
    assert level.output_throughput_tok_s is not None
    assert level.output_throughput_tok_s < level.steady.output_throughput_tok_s


def test_queue_of_the_server_is_in_ttft(session: LoadSession, model: Path) -> None:
    """Room for four sequences of one block, eight streams: the second four wait a whole service time."""
    service_s = TTFT_S + (TOKENS - 1) * ITL_S
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, kv_cache_tokens=5 * 128) as mock:
        level = figures(run_cell(session, mock, closed_cell(model, 8, 8)))
    assert level.ttft.p50_ms is not None and level.ttft.max_ms is not None
    assert TTFT_S - 0.003 <= level.ttft.p50_ms / 1e3 <= TTFT_S + SLACK_S
    assert TTFT_S + service_s - 0.003 <= level.ttft.max_ms / 1e3 <= TTFT_S + service_s + SLACK_S


def test_several_tokens_in_a_chunk(session: LoadSession, model: Path) -> None:
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, tokens_per_chunk=4) as mock:
        result = run_cell(session, mock, closed_cell(model, 2, 4))
    level = figures(result)
    assert {record.chunk_tokens for record in result.records} == {(4, 4, 4, 4)}
    assert (level.output_tokens, level.itl.n) == (4 * TOKENS, 4 * 3)
    assert level.itl.p50_ms == pytest.approx(4 * ITL_S * 1e3, abs=30)
    assert level.itl_per_token is not None
    assert (level.itl_per_token.n, level.itl_per_token.p50_ms) == (4 * 12, pytest.approx(ITL_S * 1e3, abs=8))
    tpots = [tpot_s(record) for record in result.records]
    assert tpots == pytest.approx([12 * ITL_S / 15] * 4, abs=0.02)  # 12 token times after the first chunk


def test_an_empty_first_chunk_is_not_the_first_token(session: LoadSession, model: Path) -> None:
    """It comes at once; TTFT is the first token's all the same, and no chunk too many is counted."""
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, empty_first_chunk=True) as mock:
        result = run_cell(session, mock, closed_cell(model, 2, 8))
    assert all(record.completed and len(record.chunk_tokens) == TOKENS for record in result.records)
    assert distribution([ttft_s(record) for record in result.records]).p50_ms == pytest.approx(
        TTFT_S * 1e3, abs=SLACK_S * 1e3
    )


@pytest.mark.parametrize(
    ("fault", "reason", "gaps"),
    [
        ({"error_every": 3}, "HTTP 500 Internal Server Error", 0),
        ({"reset_every": 3}, "Payload|reset|disconnected", 0),
        ({"garbage_every": 3}, "JSONDecodeError|Expecting|usage", 0),
    ],
)
def test_faults_are_counted_and_none_is_dropped(
    session: LoadSession, model: Path, fault: dict[str, int], reason: str, gaps: int
) -> None:
    with start_mock(ttft_s=0.02, itl_s=0.002, **fault) as mock:
        result = run_cell(session, mock, closed_cell(model, 4, 60))
    level = figures(result)
    assert (level.requests, level.completed, level.failed) == (60, 40, 20)
    assert level.ttft.n == 60
    assert (level.ttft.p50_ms is None, level.ttft.p90_ms is None) == (False, True)
    assert "p90" not in level.ttft.needs  # infinite, not unsupported
    errors = [record.error for record in result.records if record.error is not None]
    assert len(errors) == 20
    assert all(re.search(reason, error) and "\n" not in error for error in errors)
    missing = [gap for record in result.records if record.failed for gap in itls_s(record)]
    assert len(missing) == 20 * (TOKENS - 1)  # every token that never came, and those that did


def test_stalled_streams_are_failures_of_their_cell_alone(session: LoadSession, model: Path) -> None:
    """One in eight goes silent after its first chunk; ending the cell shows them as stopped, not as answered."""
    with start_mock(ttft_s=0.02, itl_s=0.002, stall_every=8) as mock:
        result = run_cell(session, mock, closed_cell(model, 4, 16), stop_after=14)
    level = figures(result)
    assert (level.completed, level.failed, level.stopped) == (14, 0, 2)
    assert [record.index for record in result.records] == list(range(16))


def test_missing_usage_is_a_failure_not_a_guess(session: LoadSession, model: Path) -> None:
    with start_mock(omit_usage=True) as mock:
        result = run_cell(session, mock, closed_cell(model, 2, 4))
    assert {record.error for record in result.records} == {
        "the stream ended without the server's token counts (usage)"
    }
    assert {record.output_tokens for record in result.records} == {None}


def test_a_cell_that_is_decided_is_stopped_and_the_next_one_starts_clean(
    session: LoadSession, model: Path
) -> None:
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S) as mock:
        started = time.monotonic()
        result = run_cell(session, mock, closed_cell(model, 4, 400), stop_after=8)
        assert time.monotonic() - started < 5  # 400 requests on 4 streams would take 50 s
        outcomes = [record.outcome for record in result.records]
        assert outcomes.count("completed") >= 8 and 1 <= outcomes.count("stopped") <= 4
        assert len(result.records) < 30
        again = run_cell(session, mock, closed_cell(model, 2, 4))
    assert [record.outcome for record in again.records] == ["completed"] * 4


def test_a_cell_that_was_given_up_leaves_nothing_for_the_next(session: LoadSession, model: Path) -> None:
    """An observer that raises ends its cell; the records of the same session's next cell are its own."""

    class Raising(Seen):
        def tick(self) -> bool:
            if len(self.records) >= 4:
                raise EngineFailedError("given up")
            return False

    with start_mock(ttft_s=0.1, itl_s=0.01) as mock:
        given_up = replace(closed_cell(model, 4, 100), name="given-up")
        with pytest.raises(EngineFailedError, match="given up"):
            session.run(Target(mock.base_url, mock.served_name), given_up, Raising())
        again = run_cell(session, mock, closed_cell(model, 2, 6))
    assert [(record.cell, record.index) for record in again.records] == [("level-2", i) for i in range(6)]
    assert all(record.completed for record in again.records)


def test_open_loop_keeps_its_schedule_and_counts_from_it(session: LoadSession, model: Path) -> None:
    """40 requests/s to a server that takes 4 at a time for 0.1 s each: it keeps up, and each is sent when it was due."""
    times = arrivals(20.0, 40, "open")
    cell = replace(closed_cell(model, 4, 40), name="open-20", concurrency=None, arrivals_s=times)
    with start_mock(ttft_s=0.05, itl_s=0.003) as mock:
        result = run_cell(session, mock, cell)
    assert all(record.scheduled_s is not None for record in result.records)
    first = result.records[0].origin_s - times[0]
    assert [record.origin_s - first for record in result.records] == pytest.approx(times, abs=1e-6)
    plan = SearchPlan("open", Axis(1, 1, 64, False, 0.1), max_requests=40)
    found = probe_result(result.records, 20.0, replace(SLO, limits=Limits(1, 1)), plan)
    assert found.schedule_lag_p99_ms is not None and 0 <= found.schedule_lag_p99_ms < 50


def test_open_loop_latency_grows_with_the_servers_queue(session: LoadSession, model: Path) -> None:
    """One at a time for 0.2 s, ten a second: the last of 20 waits for about 20 x 0.1 s."""
    times = tuple(0.1 * index for index in range(20))
    cell = replace(closed_cell(model, 4, 20), name="open-10", concurrency=None, arrivals_s=times)
    with start_mock(ttft_s=0.05, itl_s=0.01, max_num_seqs=1) as mock:
        result = run_cell(session, mock, cell)
    assert ttft_s(result.records[0]) == pytest.approx(0.05, abs=SLACK_S)
    assert ttft_s(result.records[-1]) == pytest.approx(0.05 + 19 * 0.1, abs=0.6)


def test_generator_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from pipeline.load.driver import make_driver\n"
        "with make_driver('vllm-bench', sys.argv[1]).session(Path(sys.argv[2])) as own:\n"
        "    own._wait_ready(100); print('ready', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script, str(environment_python("serve")), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "the load generator outlived its parent"
        time.sleep(0.1)
