"""The whole run of a variant's cells against the mock server: recomputable, stopped by what it must be stopped by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell, CellResult, LoadSession, Observer, Target, make_driver
from pipeline.load.fill import fill_result, plan_fill
from pipeline.load.measure import LoadOutcome, LoadPlan, run_load
from pipeline.load.metrics import Limits, summarise
from pipeline.load.records import RequestRecord, read_records, write_records
from pipeline.load.search import Axis
from pipeline.load.slo import SearchPlan, Slo, probe_result
from pipeline.load.workload import make_source
from pipeline.results import Capacity
from pipeline.serving.sampler import MetricsSampler
from pipeline.settings.schema import FixedWorkload
from tests.support.environments import environment_python
from tests.support.load_cells import TOKENS, Watched
from tests.support.mock_vllm import MockServer, start_mock

SLO = Slo(Limits(ttft_ms=500, tpot_ms=60), percentile=0.8, confidence=0.9)


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


class Sampled:
    """The mock's `hold`: the requests of each wave wait until the last of them has come and two samples have been taken since.

    So a sample shows them together, whatever the machine does meanwhile. A wave is (first, last), counted as they come.
    """

    def __init__(self, *waves: tuple[int, int]) -> None:
        self._waves = waves
        self._enough: dict[int, int] = {}
        self.sampler: MetricsSampler | None = None

    def __call__(self, number: int, received: int) -> bool:
        last = next((last for first, last in self._waves if first <= number <= last), None)
        if last is None:
            return False
        if received < last or self.sampler is None:
            return True
        taken = len(self.sampler.timeline)
        return taken < self._enough.setdefault(last, taken + 2)


def run_plan(
    plan: LoadPlan,
    session: LoadSession,
    mock: MockServer,
    outcome: LoadOutcome,
    sampled: Sampled | None = None,
    **options: Any,
) -> MetricsSampler:
    with MetricsSampler(mock.base_url, interval_s=0.1) as sampler:
        if sampled is not None:
            sampled.sampler = sampler
        run_load(plan, session, Watched(mock), sampler, outcome, **options)
    return sampler


def test_whole_run_is_recomputable_from_its_files(session: LoadSession, model: Path, tmp_path: Path) -> None:
    """Fill test, levels and a search; afterwards the files alone give every published figure again."""
    search = SearchPlan("closed", Axis(2, 1, 16, whole=True, resolution=0), max_requests=30)
    plan = load_plan(model, 2, 8, searches=((search, 60.0),))
    outcome = LoadOutcome()
    script = {"kv_cache_tokens": 3584, "preemptions_per_request": 1, "max_num_seqs": 6, "max_model_len": 512}
    # One request of warm-up, nine of the fill test, six and sixteen of the levels.
    sampled = Sampled((2, 10), (11, 12), (17, 24))
    plan = replace(plan, fill=replace(plan.fill, predicted_running=6) if plan.fill else None)
    with start_mock(ttft_s=0.1, itl_s=0.01, hold=sampled, **script) as mock:
        sampler = run_plan(plan, session, mock, outcome, sampled)
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
    assert [phase.name for phase in outcome.laps.phases()] == ["warm-up", "fill", "levels", "closed search"]
    (found,) = outcome.searches
    assert outcome.laps.phases()[-1].seconds >= found.duration_s - 0.01
    for probe in found.probes:
        assert probe_result(of(probe.cell), probe.load, SLO, search, probe.client_cpu_share) == probe
    assert outcome.fill is not None and plan.fill is not None
    assert outcome.fill.agrees, outcome.fill.note
    assert fill_result(plan.fill, plan.capacity, 3584, of("fill"), timeline) == outcome.fill


def test_fill_test_finds_the_pools_limit(session: LoadSession, model: Path) -> None:
    """28 blocks, one of them the null block, four a sequence: six run, and the seventh waits though the log says 7.00x."""
    outcome, sampled = LoadOutcome(), Sampled((2, 10))
    with start_mock(ttft_s=0.3, itl_s=0.02, kv_cache_tokens=3584, max_model_len=512, hold=sampled) as mock:
        run_plan(load_plan(model, 1), session, mock, outcome, sampled)
    found = outcome.fill
    assert found is not None
    assert (found.predicted_running, found.observed_peak_running) == (6, 6)
    assert found.waiting_at_peak == 3
    assert found.agrees and found.observed_peak_kv_usage == pytest.approx(24 / 27)


def test_search_finds_the_servers_limit(session: LoadSession, model: Path) -> None:
    """Six run at a time and a seventh is refused, which is infinitely late: the limit is six however slow the machine.

    Whoever is refused hears it in 0.3 s, whoever is served takes 0.5 s: with seven streams 22 % are refused, one in twenty may be.
    """
    search = SearchPlan("closed", Axis(4, 1, 24, whole=True, resolution=0), max_requests=40)
    slo = Slo(Limits(1e6, 1e6), 0.95, 0.7)
    plan = load_plan(model, 1, fill=None, searches=((search, 1e6),), slo=slo)
    outcome = LoadOutcome()
    with start_mock(ttft_s=0.5, max_num_seqs=6, refuse_after_s=0.3) as mock:
        run_plan(plan, session, mock, outcome)
    (found,) = outcome.searches
    assert (found.low, found.high) == (6, 6)
    assert [(probe.load, probe.decision) for probe in found.probes] == [
        (4, "pass"),
        (8, "fail"),
        (6, "pass"),
        (7, "fail"),
    ]


def test_prefix_cache_hits_end_the_run(session: LoadSession, model: Path) -> None:
    with (
        start_mock(prefix_hit_rate=0.1, ttft_s=0.05) as mock,
        pytest.raises(EngineFailedError, match=r"10\.0% of the prompt tokens of level-2"),
    ):
        run_plan(load_plan(model, 2, fill=None), session, mock, LoadOutcome())


def test_stalled_server_ends_the_run_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    """The third request, one of the level's, never goes on after its first chunk; ten seconds are many times a slow start."""
    before = set(psutil.Process().children(recursive=True))
    driver = make_driver("vllm-bench", environment_python("serve"))
    plan = load_plan(model, 2, fill=None)
    with (
        start_mock(stall_every=3) as mock,
        driver.session(tmp_path) as own,
        pytest.raises(EngineFailedError, match=r"made no token for 10 s at level-2, \d of 6 requests done"),
    ):
        run_plan(plan, own, mock, LoadOutcome(), stall_timeout_s=10)
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
