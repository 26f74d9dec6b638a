"""vLLM's real load generator, in its own environment, against the mock server: what is measured is what was scripted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.errors import EngineFailedError
from pipeline.load.driver import CellResult, LoadSession, Request, Target
from pipeline.load.metrics import Limits, e2el_s, itls_s, summarise, tpot_s, ttft_s
from pipeline.load.records import RequestRecord
from pipeline.load.search import Axis
from pipeline.load.slo import SearchPlan, Slo, arrivals, probe_result
from pipeline.results import LoadLevel
from tests.support.environments import environment_python
from tests.support.load_cells import TOKENS, Seen, closed_cell, run_cell
from tests.support.mock_vllm import REPOSITORY, start_mock
from tests.support.patience import wait_until_empty
from tests.support.processes import alive
from tests.support.scripted_times import SCRIPTS, Script, run_script

TTFT_S, ITL_S = 0.2, 0.02
CLOCK_S = 0.001  # two processes, one clock, and the rounding of a sleep
SLO = Slo(Limits(ttft_ms=500, tpot_ms=60), percentile=0.8, confidence=0.9)


def figures(result: CellResult) -> LoadLevel:
    return summarise(result.records, [])


def measured(result: CellResult) -> list[RequestRecord]:
    return [record for record in result.records if not record.warmup]


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """The largest number of requests in flight at the start of one."""
    return max(sum(other.start_s <= one.start_s < other.end_s for other in records) for one in records)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.streams}-streams")
def test_every_request_has_the_times_of_its_own_script(
    session: LoadSession, model: Path, script: Script
) -> None:
    """A request is sent before the mock has it, no token comes before the mock sent it, and no stream has two at once.

    A busy machine is late, never early, so nothing is said of how late; `make bench` holds all to 1 ms + 1 %. What a wrong
    definition would do shows all the same: another request's times, the client's own queue, a token too early or too many.
    """
    found = run_script(session, model, script)
    assert most_at_once(found.result.records) <= script.streams
    for record, arrived_s, sent_s in zip(measured(found.result), found.arrived_s, found.sent_s, strict=True):
        seen_s = [record.start_s + (record.ttft_s or 0.0)]
        for gap_s in record.itls_s:
            seen_s.append(seen_s[-1] + gap_s)
        assert record.start_s < arrived_s + CLOCK_S
        assert all(seen > sent - CLOCK_S for seen, sent in zip(seen_s, sent_s, strict=True))
    assert all(record.completed for record in found.result.records)
    late = {
        metric: [m - s for m, s in zip(measured, found.scripted[metric], strict=True)]
        for metric, measured in found.measured.items()
    }
    gaps = script.tokens - 1
    for first, end, gap in zip(late["TTFT"], late["E2EL"], late["TPOT"], strict=True):
        assert min(first, end) > -CLOCK_S
        assert gap == pytest.approx((end - first) / gaps, abs=CLOCK_S)
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
    """The first request of the warm-up isn't answered before twelve measured ones have come: a drain would wait forever."""

    def hold(number: int, received: int) -> bool:
        return number == 1 and received < 20

    with start_mock(ttft_s=0.05, itl_s=0.005, hold=hold) as mock:
        result = run_cell(session, mock, closed_cell(model, 8, 40, warmup=8, stagger_s=0.05))
    records = sorted(result.records, key=lambda record: record.start_s)
    assert [record.warmup for record in records] == [True] * 8 + [False] * 32
    assert all(record.completed for record in records) and most_at_once(records) <= 8
    assert max(record.end_s for record in records[:8]) > records[19].start_s


def test_queue_of_the_server_is_in_ttft(session: LoadSession, model: Path) -> None:
    """Room for four sequences of one block, eight streams: the second four wait a whole service time.

    The first four are answered only once all eight have come, so however slow the machine sends them, that is the least.
    """
    service_s = TTFT_S + (TOKENS - 1) * ITL_S
    script = {"ttft_s": TTFT_S, "itl_s": ITL_S, "kv_cache_tokens": 5 * 128}
    with start_mock(**script, hold=lambda number, received: received < 8) as mock:
        result = run_cell(session, mock, closed_cell(model, 8, 8))
    found = sorted(ttft_s(record) for record in result.records)
    assert found[0] > TTFT_S - CLOCK_S
    assert found[4] > TTFT_S + service_s - CLOCK_S


def test_several_tokens_in_a_chunk(session: LoadSession, model: Path) -> None:
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, tokens_per_chunk=4) as mock:
        result = run_cell(session, mock, closed_cell(model, 2, 4))
    level = figures(result)
    assert {record.chunk_tokens for record in result.records} == {(4, 4, 4, 4)}
    assert (level.output_tokens, level.itl.n) == (4 * TOKENS, 4 * 3)
    assert level.itl_per_token is not None and level.itl.p50_ms is not None
    assert level.itl_per_token.n == 4 * 12
    assert level.itl_per_token.p50_ms == pytest.approx(level.itl.p50_ms / 4)
    for record in result.records:
        assert e2el_s(record) > TTFT_S + 12 * ITL_S - CLOCK_S  # 12 token times after the first chunk
        assert tpot_s(record) == pytest.approx((e2el_s(record) - ttft_s(record)) / 15)


def test_an_empty_first_chunk_is_not_the_first_token(session: LoadSession, model: Path) -> None:
    """It comes at once; TTFT is the first token's all the same, and no chunk too many is counted."""
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, empty_first_chunk=True) as mock:
        result = run_cell(session, mock, closed_cell(model, 2, 8))
    assert all(record.completed and len(record.chunk_tokens) == TOKENS for record in result.records)
    assert all(ttft_s(record) > TTFT_S - CLOCK_S for record in result.records)


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
    """The fifth request is held until all 400 have come, which they don't: it is in flight when the cell is stopped."""

    def hold(number: int, received: int) -> bool:
        return number == 5 and received < 400

    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, hold=hold) as mock:
        result = run_cell(session, mock, closed_cell(model, 4, 400), stop_after=8)
        outcomes = [record.outcome for record in result.records]
        assert outcomes.count("completed") >= 8 and 1 <= outcomes.count("stopped") <= 4
        assert len(result.records) < 400
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
    """40 requests, 20 a second, to a server that keeps up: each is sent when it was due or later, and the lag is known."""
    times = arrivals(20.0, 40, "open")
    cell = replace(closed_cell(model, 4, 40), name="open-20", concurrency=None, arrivals_s=times)
    with start_mock(ttft_s=0.05, itl_s=0.003) as mock:
        result = run_cell(session, mock, cell)
    assert all(record.scheduled_s is not None for record in result.records)
    first = result.records[0].origin_s - times[0]
    assert [record.origin_s - first for record in result.records] == pytest.approx(times, abs=1e-6)
    plan = SearchPlan("open", Axis(1, 1, 64, False, 0.1), max_requests=40)
    found = probe_result(result.records, 20.0, replace(SLO, limits=Limits(1, 1)), plan)
    lags_s = sorted(record.start_s - record.origin_s for record in result.records)
    assert lags_s[0] >= 0
    assert found.schedule_lag_p99_ms == pytest.approx(lags_s[-1] * 1e3)  # the 40th of 40


def test_open_loop_latency_grows_with_the_servers_queue(session: LoadSession, model: Path) -> None:
    """One at a time for 0.2 s, ten a second: whoever of 20 is served last has waited for 20 x 0.1 s at least."""
    times = tuple(0.1 * index for index in range(20))
    cell = replace(closed_cell(model, 4, 20), name="open-10", concurrency=None, arrivals_s=times)
    with start_mock(ttft_s=0.05, itl_s=0.01, max_num_seqs=1) as mock:
        result = run_cell(session, mock, cell)
    assert min(ttft_s(record) for record in result.records) > 0.05 - CLOCK_S
    assert max(ttft_s(record) for record in result.records) > 0.05 + 19 * 0.1 - CLOCK_S


def test_generator_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from pipeline.load.driver import make_driver\n"
        "with make_driver('vllm-bench', sys.argv[1]).session(Path(sys.argv[2])) as own:\n"
        "    own._wait_ready(600); print('ready', flush=True); time.sleep(600)"
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
    wait_until_empty(lambda: alive(children))
