"""vLLM's real load generator, in its own environment, against the mock server: what is measured is what was scripted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell, CellResult, LoadSession, Observer, Request, Target, make_driver
from pipeline.load.fill import plan_fill
from pipeline.load.measure import LoadOutcome, LoadPlan, run_load
from pipeline.load.metrics import Limits, distribution, e2el_s, itls_s, summarise, tpot_s, ttft_s
from pipeline.load.records import RequestRecord, read_records, write_records
from pipeline.load.search import Axis
from pipeline.load.slo import SearchPlan, Slo, arrivals, probe_result
from pipeline.load.workload import make_source
from pipeline.results import Capacity, LoadLevel
from pipeline.serving.sampler import MetricsSampler
from pipeline.settings.schema import FixedWorkload
from tests.support.environments import environment_python
from tests.support.mock_vllm import REPOSITORY, MockServer, start_mock

TOKENS = 16
TTFT_S, ITL_S = 0.2, 0.02
SLACK_S = 0.05  # of a two-core machine that runs client, mock and other tests at once
SLO = Slo(Limits(ttft_ms=500, tpot_ms=60), percentile=0.8, confidence=0.9)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadSession]:
    """One generator process for the module: importing vLLM takes 10 s. A proxy of the user's must not be in the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "")
        with make_driver("vllm-bench", environment_python("serve")).session(
            tmp_path_factory.mktemp("bench")
        ) as started:
            yield started


class Watched:
    """A mock that can be asked whether it lives, as `pipeline.serving.server.Server` can."""

    def __init__(self, mock: MockServer) -> None:
        self.base_url = mock.base_url
        self.served_name = mock.served_name
        self.dead = False

    def check(self) -> None:
        if self.dead:
            raise EngineFailedError(
                "the server of demo died: RuntimeError: scripted death; its log is serve.log"
            )


class Seen:
    """An observer that keeps what it is told and stops the cell after so many ends."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.records: list[RequestRecord] = []
        self._stop_after = stop_after

    def request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def tick(self) -> bool:
        return self._stop_after is not None and len(self.records) >= self._stop_after


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {chr(0x4E00 + number): number for number in range(2000)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


def closed_cell(model: Path, concurrency: int, count: int, tokens: int = TOKENS, **options: Any) -> Cell:
    workload = FixedWorkload(kind="fixed", input_tokens=100, output_tokens=tokens)
    name = f"level-{concurrency}"
    requests = make_source(workload, model, 1, 2048).requests(name, count)
    return Cell(name, requests, concurrency=concurrency, **options)


def run_cell(session: LoadSession, mock: MockServer, cell: Cell, stop_after: int | None = None) -> CellResult:
    return session.run(Target(mock.base_url, mock.served_name), cell, Seen(stop_after))


def figures(result: CellResult) -> LoadLevel:
    return summarise(result.records, [])


def assert_truth(
    found: Callable[[RequestRecord], float], records: Any, truth_s: list[float], what: str
) -> None:
    """Every percentile of what was measured is the scripted one's to 1 ms + 1 %."""
    ordered = sorted(found(record) for record in records)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0):
        rank = max(0, round(share * len(ordered)) - 1)
        expected = sorted(truth_s)[rank]
        assert ordered[rank] == pytest.approx(expected, rel=0, abs=0.001 + 0.01 * expected), (
            f"{what} p{share * 100:g}: {ordered[rank] * 1e3:.1f} ms measured, {expected * 1e3:.1f} scripted"
        )


@pytest.mark.parametrize(
    ("streams", "requests", "tokens", "first_s", "gap_s"),
    [(1, 12, 16, 0.1, 0.02), (64, 192, 16, 0.6, 0.2), (512, 512, 6, 4.0, 1.5)],
)
def test_every_percentile_is_the_scripted_one(
    session: LoadSession, model: Path, streams: int, requests: int, tokens: int, first_s: float, gap_s: float
) -> None:
    """Each of a period's requests has times of its own, so a mixed-up or dropped one shows in some percentile."""
    period = min(requests, 64)
    script = {"ttft_step_s": first_s / period, "itl_step_s": gap_s / 2 / period, "step_period": period}
    # Starts 5 ms apart, as the pipeline's own: 512 connections at one instant would measure the client's queue.
    cell = closed_cell(model, streams, requests, tokens, stagger_s=0.005)
    with start_mock(ttft_s=first_s, itl_s=gap_s, kv_cache_tokens=10**6, max_num_seqs=1024, **script) as mock:
        result = run_cell(session, mock, cell)
        order = {tuple(body["prompt"]): number for number, body in enumerate(mock.requests)}
    steps = [order[request.prompt] % period for request in cell.requests]
    firsts = [first_s * (1 + step / period) for step in steps]
    gaps = [gap_s * (1 + step / 2 / period) for step in steps]
    assert all(record.completed for record in result.records)
    assert_truth(ttft_s, result.records, firsts, "TTFT")
    assert_truth(tpot_s, result.records, gaps, "TPOT")
    ends = [first + (tokens - 1) * gap for first, gap in zip(firsts, gaps, strict=True)]
    assert_truth(e2el_s, result.records, ends, "E2EL")
    level = figures(result)
    assert (level.input_tokens, level.output_tokens) == (100 * requests, tokens * requests)
    assert (level.itl.n, level.ttft.n) == ((tokens - 1) * requests, requests)
    assert level.itl.p50_ms == pytest.approx(sorted(gaps)[len(gaps) // 2] * 1e3, rel=0.02, abs=1)


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
    assert level.steady.output_throughput_tok_s == pytest.approx(8 * TOKENS / service_s, rel=0.1)
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
    assert level.itl.p50_ms == pytest.approx(4 * ITL_S * 1e3, abs=10)
    assert level.itl_per_token is not None
    assert (level.itl_per_token.n, level.itl_per_token.p50_ms) == (4 * 12, pytest.approx(ITL_S * 1e3, abs=3))
    tpots = [tpot_s(record) for record in result.records]
    assert tpots == pytest.approx([12 * ITL_S / 15] * 4, abs=0.004)  # 12 token times after the first chunk


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
    assert ttft_s(result.records[-1]) == pytest.approx(0.05 + 19 * 0.1, abs=0.3)


# --- the whole run ----------------------------------------------------------------------------------------------------


def capacity(tokens: int, max_model_len: int = 512) -> Capacity:
    blocks = tokens // 128
    return Capacity(
        max_model_len=max_model_len,
        block_size=128,
        kappa_bytes=23_040,
        kv_budget_bytes=None,
        predicted_tokens=tokens,
        predicted_sequences=None,
        predicted_fitting_sequences=(blocks - 1) // (max_model_len // 128),
        reported_tokens=None,
        reported_sequences=None,
        observed_peak_running=None,
    )


def load_plan(model: Path, *levels: int, tokens: int = 3584, **changes: Any) -> LoadPlan:
    """Levels of short requests, and a fill test of full-length ones on a pool of 27 usable blocks."""
    fill = plan_fill(capacity(tokens), 3, 256, 2048)
    lengths = FixedWorkload(kind="fixed", input_tokens=fill.prompt_tokens, output_tokens=fill.output_tokens)
    values: dict[str, Any] = {
        "source": make_source(
            FixedWorkload(kind="fixed", input_tokens=100, output_tokens=TOKENS), model, 1, 512
        ),
        "levels": levels,
        "requests_per_stream": 1,
        "min_requests": 4,
        "repeats": 1,
        "warmup_requests": 1,
        "slo": SLO,
        "fill": fill,
        "fill_source": make_source(lengths, model, 1, 512),
        "searches": (),
        "capacity": capacity(tokens),
        "reported_tokens": tokens,
        "seed": 1,
    }
    return LoadPlan(**(values | changes))


def run_plan(
    plan: LoadPlan, session: LoadSession, mock: MockServer, outcome: LoadOutcome, **options: Any
) -> MetricsSampler:
    with MetricsSampler(mock.base_url, interval_s=0.1) as sampler:
        run_load(plan, session, Watched(mock), sampler, outcome, **options)
    return sampler


def test_whole_run_is_recomputable_from_its_files(session: LoadSession, model: Path, tmp_path: Path) -> None:
    """Fill test, levels and a search; afterwards the files alone give every published figure again."""
    search = SearchPlan("closed", Axis(2, 1, 16, whole=True, resolution=0), max_requests=30)
    plan = load_plan(model, 2, 8, searches=((search, 60.0),))
    outcome = LoadOutcome()
    script = {"kv_cache_tokens": 3584, "preemptions_per_request": 1, "max_num_seqs": 6, "max_model_len": 512}
    plan = replace(plan, fill=replace(plan.fill, predicted_running=6) if plan.fill else None)
    with start_mock(ttft_s=0.1, itl_s=0.01, **script) as mock:
        sampler = run_plan(plan, session, mock, outcome)
    assert [(level.peak_running, level.peak_waiting) for level in outcome.levels] == [(2, 0), (6, 2)]
    assert [level.preemptions for level in outcome.levels] == [
        6,
        16,
    ]  # the warm-up's and the fill test's belong to neither
    assert [level.prefix_cache_hit_rate for level in outcome.levels] == [0.0, 0.0]
    stored = read_records(write_records(tmp_path / "demo.requests.parquet", outcome.records))
    lines = sampler.write(tmp_path / "timeline.jsonl").read_text().splitlines()
    timeline = [json.loads(line) for line in lines]

    def of(cell: str) -> list[RequestRecord]:
        return [record for record in stored if record.cell == cell]

    for level in outcome.levels:
        share = level.client_cpu_share
        assert summarise(of(level.cell), timeline, SLO.limits, client_cpu_share=share) == level
    (found,) = outcome.searches
    for probe in found.probes:
        assert probe_result(of(probe.cell), probe.load, SLO, search, probe.client_cpu_share) == probe
    assert outcome.fill is not None and plan.fill is not None
    assert outcome.fill.agrees, outcome.fill.note
    from pipeline.load.fill import fill_result

    assert fill_result(plan.fill, plan.capacity, 3584, of("fill"), timeline) == outcome.fill


def test_fill_test_finds_the_pools_limit(session: LoadSession, model: Path) -> None:
    """28 blocks, one of them the null block, four a sequence: six run, and the seventh waits though the log says 7.00x."""
    outcome = LoadOutcome()
    with start_mock(ttft_s=0.3, itl_s=0.02, kv_cache_tokens=3584, max_model_len=512) as mock:
        run_plan(load_plan(model, 1), session, mock, outcome)
    found = outcome.fill
    assert found is not None
    assert (found.predicted_running, found.observed_peak_running, found.waiting_at_peak) == (6, 6, 3)
    assert found.agrees and found.observed_peak_kv_usage == pytest.approx(24 / 27)


def test_search_finds_the_servers_limit(session: LoadSession, model: Path) -> None:
    """Six run at a time; with 12 streams each waits as long as it is served, with seven one in seven does.

    A wait of 0.25 s is over the TTFT limit of 0.2 s. Four in five must be within it: eight streams are too many for sure.
    """
    search = SearchPlan("closed", Axis(4, 1, 24, whole=True, resolution=0.25), max_requests=40)
    slo = Slo(Limits(200, 1000), 0.8, 0.9)
    plan = load_plan(model, 1, fill=None, searches=((search, 60.0),), slo=slo)
    outcome = LoadOutcome()
    with start_mock(ttft_s=0.1, itl_s=0.01, max_num_seqs=6) as mock:
        run_plan(plan, session, mock, outcome)
    (found,) = outcome.searches
    assert found.low is not None and 4 <= found.low <= 10
    assert found.high is not None and found.high <= 14
    assert found.probes[0].decision == "pass"
    assert any(probe.decision == "fail" for probe in found.probes)


def test_prefix_cache_hits_end_the_run(session: LoadSession, model: Path) -> None:
    with (
        start_mock(prefix_hit_rate=0.1, ttft_s=0.05) as mock,
        pytest.raises(EngineFailedError, match=r"10\.0% of the prompt tokens of level-2"),
    ):
        run_plan(load_plan(model, 2, fill=None), session, mock, LoadOutcome())


def test_stalled_server_ends_the_run_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    """The third request, one of the level's, never goes on after its first chunk."""
    before = set(psutil.Process().children(recursive=True))
    driver = make_driver("vllm-bench", environment_python("serve"))
    plan = load_plan(model, 2, fill=None)
    with (
        start_mock(stall_every=3) as mock,
        driver.session(tmp_path) as own,
        pytest.raises(EngineFailedError, match=r"made no token for 3 s at level-2, \d of 6 requests done"),
    ):
        run_plan(plan, own, mock, LoadOutcome(), stall_timeout_s=3)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert (tmp_path / "warmup.json").is_file()
    assert not list(tmp_path.glob("*.partial"))


class Dying:
    """Lets the server's `check` see the death that a failed request is the first sign of."""

    def __init__(self, session: LoadSession, server: Watched) -> None:
        self._session = session
        self._server = server

    def run(self, target: Target, cell: Cell, observer: Observer) -> CellResult:
        outer = self

        class Telling:
            def request(self, record: RequestRecord) -> None:
                outer._server.dead = outer._server.dead or record.failed
                observer.request(record)

            def tick(self) -> bool:
                return observer.tick()

        return self._session.run(target, cell, Telling())


def test_server_that_dies_in_the_middle_leaves_what_was_finished(session: LoadSession, model: Path) -> None:
    """The warm-up and the first level's six requests are answered; the next level's second is the end."""
    outcome = LoadOutcome()
    with (
        start_mock(die_at_request=9, ttft_s=0.02) as mock,
        MetricsSampler(mock.base_url, interval_s=0.2) as sampler,
    ):
        server = Watched(mock)
        with pytest.raises(EngineFailedError, match=r"scripted death; its log is serve\.log"):
            run_load(load_plan(model, 2, 4, fill=None), Dying(session, server), server, sampler, outcome)
        assert len(mock.requests) >= 9
    assert [level.cell for level in outcome.levels] == ["level-2"]
    assert {record.cell for record in outcome.records} == {"level-2", "level-4"}


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
