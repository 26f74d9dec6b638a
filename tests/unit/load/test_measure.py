"""The run over all cells with a scripted session, server and sampler: attribution, and every way it must stop."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError
from pipeline.load import measure
from pipeline.load.driver import Cell, CellResult, Observer, Target
from pipeline.load.fill import plan_fill
from pipeline.load.measure import LoadOutcome, LoadPlan, run_load
from pipeline.load.metrics import Limits
from pipeline.load.records import RequestRecord
from pipeline.load.search import Axis
from pipeline.load.slo import SearchPlan, Slo
from pipeline.load.watch import progress_line
from pipeline.load.workload import make_source
from pipeline.settings.schema import FixedWorkload
from tests.support.load_records import record
from tests.unit.load.test_fill import capacity

Behaviour = Callable[[Cell, Observer], list[RequestRecord]]
SEARCH = SearchPlan("closed", Axis(1, 1, 8, whole=True, resolution=0), max_requests=60)


class FakeServer:
    base_url = "http://127.0.0.1:1"
    served_name = "demo"
    dead: str | None = None

    def check(self) -> None:
        if self.dead:
            raise EngineFailedError(self.dead)


class FakeSampler:
    """A sample whenever it is looked at; `hits` of the 8 prompt tokens of each request come from the prefix cache."""

    def __init__(self, session: FakeSession, hits: int = 0) -> None:
        self._session = session
        self._rows: list[dict[str, Any]] = []
        self._hits = hits
        self.often_during = 0

    @contextlib.contextmanager
    def often(self, interval_s: float) -> Iterator[None]:
        self.often_during = len(self._session.cells)
        yield
        self.often_during = len(self._session.cells) - self.often_during

    @property
    def timeline(self) -> list[dict[str, Any]]:
        done = sum(len(cell.requests) for cell in self._session.cells)
        counters = {"prefix_queries": 8 * done, "prefix_hits": self._hits * done, "preemptions_total": done}
        gauges = {"running": 0.0, "waiting": 0.0, "kv_usage": 0.5, "generation_tokens_total": 0.0}
        self._rows.append({"t_s": time.monotonic(), **counters, **gauges})
        return self._rows


class FakeSession:
    def __init__(self, behaviour: Behaviour) -> None:
        self.cells: list[Cell] = []
        self._behaviour = behaviour

    def run(self, target: Target, cell: Cell, observer: Observer) -> CellResult:
        assert target == Target("http://127.0.0.1:1", "demo")
        self.cells.append(cell)
        return CellResult(cell, tuple(self._behaviour(cell, observer)), Path("raw.json"), 0.1)


def answers(cell: Cell, observer: Observer, gap_s: float = 0.001, failing: int = 0) -> list[RequestRecord]:
    """One record per request, as the session's contract has it: told one by one, and stopped when the observer says so."""
    found: list[RequestRecord] = []
    start_s, stopping = time.monotonic(), False
    for index in range(len(cell.requests)):
        one = record(index, start_s, 0.001, gap_s, tokens=4, level=cell.concurrency, cell=cell.name)
        one = replace(one, warmup=index < cell.warmup, input_tokens=8)
        if index < failing:
            one = replace(one, error="Bad Gateway")
        if stopping:
            if sum(item.stopped for item in found) == (cell.concurrency or 1) - 1:
                break
            one = replace(one, stopped=True, input_tokens=None, output_tokens=None)
        found.append(one)
        observer.request(one)
        stopping = stopping or observer.tick()
    return found


def good(cell: Cell, observer: Observer) -> list[RequestRecord]:
    return answers(cell, observer)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = {chr(0x4E00 + number): number for number in range(256)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return tmp_path


@pytest.fixture
def plan(model: Path) -> LoadPlan:
    source = make_source(FixedWorkload(kind="fixed", input_tokens=8, output_tokens=4), model, 0, 512)
    return LoadPlan(
        source=source,
        levels=(2, 3),
        requests_per_stream=1,
        min_requests=4,
        repeats=1,
        warmup_requests=1,
        slo=Slo(Limits(1000, 50), 0.9, 0.95),
        fill=None,
        fill_source=None,
        searches=(),
        capacity=capacity(),
        reported_tokens=4480,
        seed=0,
    )


def run(
    plan: LoadPlan, session: FakeSession, server: FakeServer | None = None, hits: int = 0, **options: Any
) -> LoadOutcome:
    outcome = LoadOutcome()
    run_load(plan, session, server or FakeServer(), FakeSampler(session, hits), outcome, **options)
    return outcome


def test_levels_in_order_each_with_a_warm_up_that_does_not_drain(
    plan: LoadPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    session = FakeSession(good)
    outcome = run(plan, session)
    assert [(cell.name, cell.concurrency, cell.warmup, len(cell.requests)) for cell in session.cells] == [
        ("warmup", 1, 0, 1),
        ("level-2", 2, 2, 6),  # two to bring it to its load and four measured, in one cell
        ("level-3", 3, 3, 7),
    ]
    assert [(level.cell, level.requests, level.warmup, level.completed) for level in outcome.levels] == [
        ("level-2", 6, 2, 6),
        ("level-3", 7, 3, 7),
    ]
    assert [level.ttft.n for level in outcome.levels] == [4, 4]
    assert [level.preemptions for level in outcome.levels] == [6, 7]  # one per request: each cell got its own
    assert [level.client_cpu_share for level in outcome.levels] == [0.1, 0.1]
    assert {record.cell for record in outcome.records} == {"level-2", "level-3"}
    assert "demo [2/2] level-3: 7/7 requests" in capsys.readouterr().err


def test_repeats_are_taken_in_turn_with_other_prompts(plan: LoadPlan) -> None:
    session = FakeSession(good)
    outcome = run(replace(plan, repeats=2), session)
    assert [(level.concurrency, level.repeat) for level in outcome.levels] == [(2, 1), (3, 1), (2, 2), (3, 2)]
    prompts = [request.prompt for cell in session.cells for request in cell.requests]
    assert len(prompts) == len(set(prompts))


def test_a_settled_level_is_repeated_no_more(plan: LoadPlan) -> None:
    """Three repeats of equal figures; without the setting, and where one level goes on changing, all of them."""

    def slower(cell: Cell, observer: Observer) -> list[RequestRecord]:
        slow = cell.name.startswith("level-3") and cell.name.endswith("2")
        return answers(cell, observer, 0.01 if slow else 0.001)

    def cells(repeat_until: float | None) -> list[tuple[int, int]]:
        outcome = run(replace(plan, repeats=5, repeat_until=repeat_until), FakeSession(slower))
        return [(level.concurrency, level.repeat) for level in outcome.levels]

    assert cells(None) == [(level, repeat) for repeat in range(1, 6) for level in (2, 3)]
    assert cells(0.2) == [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3), (3, 4), (3, 5)]


def test_fill_test_ends_with_the_first_request_and_keeps_apart(plan: LoadPlan, model: Path) -> None:
    fill = plan_fill(capacity(), 4, 64, 2048)
    lengths = FixedWorkload(kind="fixed", input_tokens=fill.prompt_tokens, output_tokens=fill.output_tokens)
    session, outcome = FakeSession(good), LoadOutcome()
    sampler = FakeSampler(session)
    filling = replace(plan, fill=fill, fill_source=make_source(lengths, model, 0, 512))
    run_load(filling, session, FakeServer(), sampler, outcome)
    assert sampler.often_during == 2  # cells: the warm-up and the fill test, and no level
    cell = session.cells[1]
    assert (cell.name, cell.concurrency, len(cell.requests)) == ("fill", 12, 12)
    assert {len(request.prompt) + request.output_tokens for request in cell.requests} == {512}
    kept = [item for item in outcome.records if item.cell == "fill"]
    assert [item.outcome for item in kept[:2]] == ["completed", "stopped"]
    assert outcome.fill is not None and outcome.fill.offered == 12
    assert all(level.cell != "fill" for level in outcome.levels)


def test_search_probes_stop_once_decided(plan: LoadPlan) -> None:
    """Up to 5 streams 1 ms between tokens, above 100 ms: the limit is 5."""
    session = FakeSession(
        lambda cell, observer: answers(cell, observer, 0.1 if (cell.concurrency or 0) > 5 else 0.001)
    )
    outcome = run(replace(plan, levels=(2,), searches=((SEARCH, 60.0),)), session)
    (found,) = outcome.searches
    assert (found.low, found.high, found.mode) == (5, 5, "closed")
    assert found.note == "the SLO holds up to 5 streams"
    assert [probe.load for probe in found.probes] == [4, 8, 6, 5]  # 2 streams were seen to meet the limits
    assert all(probe.requests < 60 + probe.load for probe in found.probes)
    assert outcome.probes == found.probes
    assert found.requests == sum(item.cell.startswith("closed-") for item in outcome.records)


def test_probes_that_were_finished_are_kept_when_the_engine_dies(plan: LoadPlan) -> None:
    server = FakeServer()

    def behaviour(cell: Cell, observer: Observer) -> list[RequestRecord]:
        if cell.name == "closed-8":
            server.dead = "the server of demo died: out of memory; its log is serve.log"
            observer.request(replace(record(0, time.monotonic(), 1, 1, cell=cell.name), error="reset"))
            observer.tick()  # a failed request makes it look
            pytest.fail("the run went on with a dead engine")
        return good(cell, observer)

    session = FakeSession(behaviour)
    outcome = LoadOutcome()
    with pytest.raises(EngineFailedError, match="out of memory"):
        run_load(replace(plan, searches=((SEARCH, 60.0),)), session, server, FakeSampler(session), outcome)
    assert [level.cell for level in outcome.levels] == ["level-2", "level-3"]
    assert [(probe.load, probe.decision) for probe in outcome.probes] == [(6, "pass")]
    assert outcome.searches == []
    assert [item.error for item in outcome.records if item.cell == "closed-8"] == ["reset"]


def test_some_failures_are_figures_not_an_end(plan: LoadPlan) -> None:
    session = FakeSession(lambda cell, observer: answers(cell, observer, failing=1))
    outcome = run(replace(plan, warmup_requests=0), session)
    assert [(level.completed, level.failed) for level in outcome.levels] == [(5, 1), (6, 1)]


def test_a_cell_in_which_everything_failed_ends_the_run(plan: LoadPlan) -> None:
    session = FakeSession(lambda cell, observer: answers(cell, observer, failing=99))
    with pytest.raises(
        EngineFailedError, match=r"all 6 requests at level-2 failed: Bad Gateway; .*raw\.json"
    ):
        run(replace(plan, warmup_requests=0), session)


def test_a_probe_of_a_server_that_answers_garbage_ends_the_run_too(plan: LoadPlan) -> None:
    def behaviour(cell: Cell, observer: Observer) -> list[RequestRecord]:
        return answers(cell, observer, failing=99 if cell.name.startswith("closed") else 0)

    with pytest.raises(EngineFailedError, match="requests at closed-6 failed: Bad Gateway"):
        run(replace(plan, searches=((SEARCH, 60.0),)), FakeSession(behaviour))


def test_a_drivers_complaint_gives_way_to_the_engines_death(plan: LoadPlan) -> None:
    server = FakeServer()

    def behaviour(cell: Cell, observer: Observer) -> list[RequestRecord]:
        server.dead = "the server of demo died: out of memory; its log is serve.log"
        raise EngineFailedError("the load generator died")

    with pytest.raises(EngineFailedError, match="out of memory"):
        run(plan, FakeSession(behaviour), server)


def test_a_server_that_stands_still_ends_the_run(plan: LoadPlan) -> None:
    def behaviour(cell: Cell, observer: Observer) -> list[RequestRecord]:
        for _ in range(100):
            observer.tick()
            time.sleep(0.02)
        return pytest.fail("the run waited on")

    with pytest.raises(EngineFailedError, match="made no token for 0 s at warmup, 0 of 1 requests done"):
        run(plan, FakeSession(behaviour), stall_timeout_s=0.2)


def test_prompts_from_the_prefix_cache_end_the_run(plan: LoadPlan) -> None:
    with pytest.raises(
        EngineFailedError, match=r"12\.5% of the prompt tokens of level-2 came from the prefix cache"
    ):
        run(plan, FakeSession(good), hits=1)


def test_a_workload_about_prefixes_may_hit_the_cache(plan: LoadPlan) -> None:
    class About:
        about_prefixes = True

        def requests(self, cell: str, count: int) -> Any:
            return plan.source.requests(cell, count)

    outcome = run(replace(plan, source=About()), FakeSession(good), hits=1)
    assert [level.prefix_cache_hit_rate for level in outcome.levels] == [0.125, 0.125]


def test_without_samples_the_figures_that_need_them_are_none(
    plan: LoadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SAMPLE_WAIT_S", 0.05)

    class Silent:
        timeline: tuple[dict[str, Any], ...] = ()

        def often(self, interval_s: float) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    outcome = LoadOutcome()
    run_load(replace(plan, min_requests=7), FakeSession(good), FakeServer(), Silent(), outcome)
    assert [
        (level.peak_running, level.preemptions, level.prefix_cache_hit_rate) for level in outcome.levels
    ] == [(None,) * 3] * 2
    assert all(level.ttft.p50_ms is not None for level in outcome.levels)


@pytest.mark.parametrize(
    ("level", "per_stream", "least", "expected"),
    [(4, 1.5, 8, 8), (16, 1.5, 8, 24), (10, 1.1, 8, 11), (16, 0.25, 8, 16)],
)
def test_measured_requests_of_a_level(
    plan: LoadPlan, level: int, per_stream: float, least: int, expected: int
) -> None:
    """1.1 x 10 is 11.000000000000002; fewer than the level would not hold its concurrency."""
    changed = replace(plan, requests_per_stream=per_stream, min_requests=least)
    assert changed.measured_requests(level) == expected


def test_progress_says_what_a_person_waits_for() -> None:
    row = {"running": 8.0, "waiting": 4.0, "kv_usage": 0.94}
    line = progress_line("closed-12", 10, 40, 1, 5.0, row, may_stop=True)
    assert line == (
        "closed-12: 10/40 requests, 5 s, 1 failed, running 8, waiting 4, KV 94%, at most 15 s left"
    )
    assert progress_line("level-4", 0, 8, 0, 1.0, {}, may_stop=False) == "level-4: 0/8 requests, 1 s"
