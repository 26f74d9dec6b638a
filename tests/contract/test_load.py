"""vLLM's real load generator, in its own environment, against the mock server: what is measured is what was scripted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell, CellResult, LoadSession, OnTick, Target, make_driver
from pipeline.load.measure import run_load
from pipeline.load.metrics import summarise
from pipeline.load.records import read_records, write_records
from pipeline.load.workload import PromptPool, Workload
from pipeline.results import LoadLevel
from pipeline.serving.sampler import MetricsSampler
from tests.support.environments import environment_python
from tests.support.mock_vllm import REPOSITORY, MockServer, start_mock

TOKENS = 16
TTFT_S, ITL_S = 0.2, 0.02
SLACK_S = 0.05  # of a two-core machine that runs client, mock and other tests at once


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadSession]:
    """One generator process for the module: importing vLLM takes 10 s. A proxy of the user's must not be in the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "")
        with make_driver("vllm-bench", environment_python("serve")).session(
            tmp_path_factory.mktemp("bench")
        ) as ready:
            yield ready


class Shared:
    """The module's session as a driver."""

    def __init__(self, session: LoadSession) -> None:
        self._session = session

    def session(self, folder: Path) -> contextlib.AbstractContextManager[LoadSession]:
        return contextlib.nullcontext(self._session)


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {chr(0x4E00 + number): number for number in range(1000)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


def workload(*levels: int, requests: int, seed: int = 1) -> Workload:
    return Workload(
        levels, 100, TOKENS, requests_per_stream=1, min_requests=requests, warmup_requests=1, seed=seed
    )


def run_cell(
    session: LoadSession, mock: MockServer, model: Path, concurrency: int, requests: int
) -> CellResult:
    load = workload(concurrency, requests=requests)
    cell = Cell(
        f"level-{concurrency}", concurrency, PromptPool(model).prompts(load, concurrency, requests), TOKENS
    )
    return session.run(Target(mock.base_url, mock.served_name), cell, lambda ended, failed: None)


def figures(result: CellResult) -> LoadLevel:
    return summarise(result.records, [], result.cell.concurrency)


def assert_close_ms(found_ms: float | None, truth_s: float) -> None:
    """Not earlier than the script (but for the timer's grain), and not much later."""
    assert found_ms is not None
    assert truth_s - 0.003 <= found_ms / 1e3 <= truth_s + SLACK_S


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 3), (16, 32)])
def test_recomputed_latencies_are_the_scripted_ones(
    session: LoadSession, model: Path, concurrency: int, requests: int
) -> None:
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S) as mock:
        level = figures(run_cell(session, mock, model, concurrency, requests))
    assert (level.completed, level.failed) == (requests, 0)
    assert (level.input_tokens, level.output_tokens) == (100 * requests, TOKENS * requests)
    assert_close_ms(level.ttft.p50_ms, TTFT_S)
    assert_close_ms(level.e2el.p50_ms, TTFT_S + (TOKENS - 1) * ITL_S)
    assert level.tpot.p50_ms == pytest.approx(ITL_S * 1e3, abs=2)
    assert level.itl.p50_ms == pytest.approx(ITL_S * 1e3, abs=5)
    assert level.itl.n == (TOKENS - 1) * requests
    rounds = requests / concurrency
    assert level.duration_s == pytest.approx(rounds * (TTFT_S + (TOKENS - 1) * ITL_S), abs=rounds * SLACK_S)


def test_each_prompt_is_sent_once_as_it_was_drawn(session: LoadSession, model: Path) -> None:
    with start_mock() as mock:
        result = run_cell(session, mock, model, 4, 12)
        bodies = list(mock.requests)
    assert sorted(tuple(body["prompt"]) for body in bodies) == sorted(result.cell.prompts)
    for body in bodies:
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (TOKENS, 0, True)
        assert (body["model"], body["stream"]) == ("demo", True)


def test_queue_of_the_server_is_in_ttft(session: LoadSession, model: Path) -> None:
    """Room for four sequences of one block, eight streams: the second four wait a whole service time."""
    service_s = TTFT_S + (TOKENS - 1) * ITL_S
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, kv_cache_tokens=5 * 128) as mock:
        level = figures(run_cell(session, mock, model, 8, 8))
    assert_close_ms(level.ttft.p50_ms, TTFT_S)
    assert_close_ms(level.ttft.max_ms, TTFT_S + service_s)


def test_several_tokens_in_a_chunk(session: LoadSession, model: Path) -> None:
    with start_mock(ttft_s=TTFT_S, itl_s=ITL_S, tokens_per_chunk=4) as mock:
        level = figures(run_cell(session, mock, model, 2, 4))
    assert (level.output_tokens, level.itl.n) == (4 * TOKENS, 4 * 3)
    assert level.itl.p50_ms == pytest.approx(4 * ITL_S * 1e3, abs=10)
    assert level.tpot.p50_ms == pytest.approx(
        12 * ITL_S * 1e3 / 15, abs=4
    )  # 12 token times after the first chunk


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error_every": 3}, "Internal Server Error"),
        ({"reset_every": 3}, "Payload|reset|disconnected"),
        ({"garbage_every": 3}, "JSONDecodeError|Expecting|usage"),
    ],
)
def test_faults_are_counted_and_none_is_dropped(
    session: LoadSession, model: Path, fault: dict[str, int], reason: str
) -> None:
    with start_mock(ttft_s=0.02, itl_s=0.002, **fault) as mock:
        result = run_cell(session, mock, model, 4, 12)
    level = figures(result)
    assert (level.requests, level.completed, level.failed) == (12, 8, 4)
    assert level.ttft.n == 12
    assert (level.ttft.p50_ms is None, level.ttft.p90_ms is None) == (False, True)
    errors = [record.error for record in result.records if record.error is not None]
    assert len(errors) == 4
    for error in errors:
        assert "\n" not in error
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(error)


def test_missing_usage_is_a_failure_not_a_guess(session: LoadSession, model: Path) -> None:
    with start_mock(omit_usage=True) as mock:
        result = run_cell(session, mock, model, 2, 4)
    assert {record.error for record in result.records} == {
        "the stream ended without the server's token counts (usage)"
    }
    assert {record.output_tokens for record in result.records} == {None}


def test_chunk_without_a_token_is_refused(session: LoadSession, model: Path) -> None:
    with (
        start_mock(empty_first_chunk=True) as mock,
        pytest.raises(EngineFailedError, match="17 chunks for 16 tokens"),
    ):
        run_cell(session, mock, model, 2, 4)


def test_whole_run_is_recomputable_from_its_files(session: LoadSession, model: Path, tmp_path: Path) -> None:
    """Levels past the pool's room; afterwards the files alone give every published figure again."""
    script = {"ttft_s": TTFT_S, "itl_s": ITL_S, "kv_cache_tokens": 5 * 128, "preemptions_per_request": 1}
    with start_mock(**script) as mock, MetricsSampler(mock.base_url, interval_s=0.1) as sampler:
        load = workload(2, 8, requests=8)
        levels, records = run_load(load, Shared(session), Watched(mock), sampler, model, tmp_path)
    assert [(level.peak_running, level.peak_waiting, level.peak_kv_usage) for level in levels] == [
        (2, 0, 0.5),
        (4, 4, 1.0),
    ]
    assert [level.preemptions for level in levels] == [8, 8]  # the warm-up's belongs to neither
    assert [level.prefix_cache_hit_rate for level in levels] == [0.0, 0.0]
    stored = read_records(write_records(tmp_path / "demo.requests.parquet", records))
    timeline = [
        json.loads(line) for line in sampler.write(tmp_path / "timeline.jsonl").read_text().splitlines()
    ]
    for level in levels:
        own = [record for record in stored if record.level == level.concurrency]
        assert summarise(own, timeline, level.concurrency) == level


def test_prefix_cache_hits_end_the_run(session: LoadSession, model: Path, tmp_path: Path) -> None:
    with (
        start_mock(prefix_hit_rate=0.1) as mock,
        MetricsSampler(mock.base_url, interval_s=0.1) as sampler,
        pytest.raises(EngineFailedError, match=r"10\.0% of the prompt tokens at concurrency 2"),
    ):
        run_load(workload(2, requests=4), Shared(session), Watched(mock), sampler, model, tmp_path)


def test_stalled_server_ends_the_run_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    """The third request, one of the level's four, never goes on after its first chunk."""
    before = set(psutil.Process().children(recursive=True))
    load, driver = workload(2, requests=4), make_driver("vllm-bench", environment_python("serve"))
    with (
        start_mock(stall_every=3) as mock,
        MetricsSampler(mock.base_url, interval_s=0.2) as sampler,
        pytest.raises(EngineFailedError, match="made no token for 3 s at level-2, 3 of 4 requests done"),
    ):
        run_load(load, driver, Watched(mock), sampler, model, tmp_path, stall_timeout_s=3)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert (tmp_path / "warmup.json").is_file()


class Dying(Shared):
    """Lets the server's `check` see the death that a failed request is the first sign of."""

    def __init__(self, session: LoadSession, server: Watched) -> None:
        super().__init__(session)
        self._server = server

    def session(self, folder: Path) -> contextlib.AbstractContextManager[LoadSession]:
        return contextlib.nullcontext(self)

    def run(self, target: Target, cell: Cell, on_tick: OnTick) -> CellResult:
        def tick(ended: int, failed: int) -> None:
            self._server.dead = failed > 0
            on_tick(ended, failed)

        return self._session.run(target, cell, tick)


def test_server_that_dies_in_the_middle(session: LoadSession, model: Path, tmp_path: Path) -> None:
    with (
        start_mock(die_at_request=8, ttft_s=0.02) as mock,
        MetricsSampler(mock.base_url, interval_s=0.2) as sampler,
    ):
        server = Watched(mock)
        with pytest.raises(EngineFailedError, match=r"scripted death; its log is serve\.log"):
            run_load(workload(2, 4, requests=4), Dying(session, server), server, sampler, model, tmp_path)
        assert len(mock.requests) >= 8


def test_generator_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from pipeline.load.driver import make_driver\n"
        "with make_driver('vllm-bench', sys.argv[1]).session(Path(sys.argv[2])): print('ready', flush=True); time.sleep(600)"
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
