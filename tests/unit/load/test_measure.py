"""The run over all levels with a scripted driver, server and sampler: attribution, and every way it must stop."""

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
from pipeline.load.driver import Cell, CellResult, OnTick, Target
from pipeline.load.measure import run_load
from pipeline.load.records import RequestRecord
from pipeline.load.workload import Workload

WORKLOAD = Workload(
    levels=(2, 3),
    input_tokens=8,
    output_tokens=4,
    requests_per_stream=1,
    min_requests=4,
    warmup_requests=1,
    seed=0,
)
Behaviour = Callable[[Cell, OnTick], list[RequestRecord]]


class FakeServer:
    base_url = "http://127.0.0.1:1"
    served_name = "demo"
    dead: str | None = None

    def check(self) -> None:
        if self.dead:
            raise EngineFailedError(self.dead)


class FakeSampler:
    """A sample whenever it is looked at; `hits` of the 8 prompt tokens of each request come from the prefix cache."""

    def __init__(self, driver: FakeDriver, hits: int = 0) -> None:
        self._driver = driver
        self._rows: list[dict[str, Any]] = []
        self._hits = hits

    @property
    def timeline(self) -> list[dict[str, Any]]:
        done = sum(len(cell.prompts) for cell in self._driver.cells)
        counters = {"prefix_queries": 8 * done, "prefix_hits": self._hits * done, "preemptions_total": done}
        gauges = {"running": 2.0, "waiting": 1.0, "kv_usage": 0.5, "generation_tokens_total": 0.0}
        self._rows.append({"t_s": time.monotonic(), **counters, **gauges})
        return self._rows


class FakeDriver:
    def __init__(self, behaviour: Behaviour) -> None:
        self.cells: list[Cell] = []
        self.closed = False
        self._behaviour = behaviour

    @contextlib.contextmanager
    def session(self, folder: Path) -> Iterator[FakeDriver]:
        try:
            yield self
        finally:
            self.closed = True

    def run(self, target: Target, cell: Cell, on_tick: OnTick) -> CellResult:
        assert target == Target("http://127.0.0.1:1", "demo")
        self.cells.append(cell)
        return CellResult(cell, tuple(self._behaviour(cell, on_tick)), Path("raw.json"))


def good(cell: Cell, on_tick: OnTick) -> list[RequestRecord]:
    start_s = time.monotonic()
    on_tick(len(cell.prompts), 0)
    return [
        RequestRecord(cell.concurrency, index, start_s, 0.001, (0.001,) * 3, 0.004, 8, 4, 4, None)
        for index in range(len(cell.prompts))
    ]


def with_failures(count: int) -> Behaviour:
    def behaviour(cell: Cell, on_tick: OnTick) -> list[RequestRecord]:
        records = good(cell, on_tick)
        on_tick(len(records), count)
        return [
            replace(record, error="Bad Gateway") if record.index < count else record for record in records
        ]

    return behaviour


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = {chr(0x4E00 + number): number for number in range(64)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return tmp_path


def test_levels_in_order_after_an_uncounted_warm_up(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = FakeDriver(good)
    levels, records = run_load(WORKLOAD, driver, FakeServer(), FakeSampler(driver), model, model)
    assert [(cell.name, cell.concurrency, len(cell.prompts)) for cell in driver.cells] == [
        ("warmup", 1, 1),
        ("level-2", 2, 4),
        ("level-3", 3, 4),
    ]
    assert [(level.concurrency, level.requests, level.completed) for level in levels] == [
        (2, 4, 4),
        (3, 4, 4),
    ]
    assert [level.preemptions for level in levels] == [
        4,
        4,
    ]  # one per request: each cell got its own and no other's
    assert [(record.level, record.index) for record in records] == [(c, i) for c in (2, 3) for i in range(4)]
    assert driver.closed
    assert "level-3: 4/4 requests" in capsys.readouterr().err


def test_some_failures_are_figures_not_an_end(model: Path) -> None:
    driver = FakeDriver(with_failures(1))
    levels, _ = run_load(
        replace(WORKLOAD, warmup_requests=0), driver, FakeServer(), FakeSampler(driver), model, model
    )
    assert [(level.completed, level.failed) for level in levels] == [(3, 1), (3, 1)]


def test_a_level_in_which_everything_failed_ends_the_run(model: Path) -> None:
    driver = FakeDriver(with_failures(4))
    with pytest.raises(
        EngineFailedError, match=r"all 4 requests at level-2 failed: Bad Gateway; .*raw\.json"
    ):
        run_load(
            replace(WORKLOAD, warmup_requests=0), driver, FakeServer(), FakeSampler(driver), model, model
        )
    assert driver.closed


def test_the_engines_death_is_the_reason_given(model: Path) -> None:
    server = FakeServer()

    def behaviour(cell: Cell, on_tick: OnTick) -> list[RequestRecord]:
        if cell.concurrency == 3:
            server.dead = "the server of demo died: out of memory; its log is serve.log"
            on_tick(1, 1)  # a failed request makes it look
            pytest.fail("the run went on with a dead engine")
        return good(cell, on_tick)

    driver = FakeDriver(behaviour)
    with pytest.raises(EngineFailedError, match="out of memory"):
        run_load(WORKLOAD, driver, server, FakeSampler(driver), model, model)
    assert driver.closed


def test_a_drivers_complaint_gives_way_to_the_engines_death(model: Path) -> None:
    server = FakeServer()

    def behaviour(cell: Cell, on_tick: OnTick) -> list[RequestRecord]:
        server.dead = "the server of demo died: out of memory; its log is serve.log"
        raise EngineFailedError("the load generator died")

    driver = FakeDriver(behaviour)
    with pytest.raises(EngineFailedError, match="out of memory"):
        run_load(WORKLOAD, driver, server, FakeSampler(driver), model, model)


def test_a_server_that_stands_still_ends_the_run(model: Path) -> None:
    def behaviour(cell: Cell, on_tick: OnTick) -> list[RequestRecord]:
        for _ in range(100):
            on_tick(0, 0)
            time.sleep(0.02)
        return pytest.fail("the run waited on")

    driver = FakeDriver(behaviour)
    with pytest.raises(EngineFailedError, match="made no token for 0 s at warmup, 0 of 1 requests done"):
        run_load(WORKLOAD, driver, FakeServer(), FakeSampler(driver), model, model, stall_timeout_s=0.2)


def test_prompts_from_the_prefix_cache_end_the_run(model: Path) -> None:
    driver = FakeDriver(good)
    with pytest.raises(
        EngineFailedError, match=r"12\.5% of the prompt tokens at concurrency 2 came from the prefix cache"
    ):
        run_load(WORKLOAD, driver, FakeServer(), FakeSampler(driver, hits=1), model, model)


def test_without_samples_the_figures_that_need_them_are_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SAMPLE_WAIT_S", 0.05)

    class Silent:
        timeline: tuple[dict[str, Any], ...] = ()

    driver = FakeDriver(good)
    levels, _ = run_load(WORKLOAD, driver, FakeServer(), Silent(), model, model)
    assert [(level.peak_running, level.preemptions, level.prefix_cache_hit_rate) for level in levels] == [
        (None,) * 3
    ] * 2
    assert all(level.ttft.p50_ms is not None for level in levels)
