"""All levels of one variant against one running server: levels and records out, progress on stderr meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell, CellResult, LoadDriver, LoadSession, Target
from pipeline.load.metrics import TimelineRow, summarise, window
from pipeline.load.records import RequestRecord
from pipeline.load.workload import WARMUP_LEVEL, PromptPool, Workload
from pipeline.results import LoadLevel

CHECK_INTERVAL_S = 5.0
SAMPLE_WAIT_S = 10.0
MAX_PREFIX_HIT_RATE = 0.01
PROGRESS_INTERVAL_S = 10.0
STALL_TIMEOUT_S = 300.0


class LoadedServer(Protocol):
    """What the load needs of a server; `pipeline.serving.server.Server` is one."""

    base_url: str
    served_name: str

    def check(self) -> None: ...


class Sampler(Protocol):
    """What the load needs of the metrics sampler; `pipeline.serving.sampler.MetricsSampler` is one."""

    @property
    def timeline(self) -> Sequence[TimelineRow]: ...


def run_load(
    workload: Workload,
    driver: LoadDriver,
    server: LoadedServer,
    sampler: Sampler,
    model_dir: str | Path,
    folder: str | Path,
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> tuple[list[LoadLevel], list[RequestRecord]]:
    """Run the warm-up and every level in turn; the figures per level and all their records.

    `folder` takes the driver's log and raw results, a cell at a time, and keeps those of the finished ones when the engine
    dies. `EngineFailedError`: the engine died (with its cause) or made no token for `stall_timeout_s`, every request of a
    level failed, token counts don't agree, or prompts were answered from the prefix cache.
    """
    pool = PromptPool(model_dir)
    levels: list[LoadLevel] = []
    records: list[RequestRecord] = []
    with driver.session(Path(folder)) as session:
        runner = _CellRunner(session, server, sampler, stall_timeout_s)
        if workload.warmup_requests:
            runner.run(_cell(workload, pool, WARMUP_LEVEL, workload.warmup_requests))
        _await_sample(sampler, time.monotonic())  # the counters' starting point
        for level in workload.levels:
            result = runner.run(_cell(workload, pool, level, workload.requests_at(level)))
            # The next cell starts after this sample, so that what the counters grew by belongs to one cell only.
            _await_sample(sampler, window(result.records)[1])
            figures = summarise(result.records, list(sampler.timeline), level)
            _require_distinct_prompts(figures)
            levels.append(figures)
            records.extend(result.records)
    return levels, records


def _cell(workload: Workload, pool: PromptPool, level: int, count: int) -> Cell:
    warmup = level == WARMUP_LEVEL
    return Cell(
        name="warmup" if warmup else f"level-{level}",
        concurrency=count if warmup else level,
        prompts=pool.prompts(workload, level, count),
        output_tokens=workload.output_tokens,
    )


@dataclass(frozen=True)
class _CellRunner:
    session: LoadSession
    server: LoadedServer
    sampler: Sampler
    stall_timeout_s: float

    def run(self, cell: Cell) -> CellResult:
        """One cell, watched; raises where its records would not be a measurement."""
        watch = _Watch(cell, self.server, self.sampler, self.stall_timeout_s)
        target = Target(self.server.base_url, self.server.served_name)
        try:
            result = self.session.run(target, cell, watch)
        except EngineFailedError:
            self.server.check()  # a dead engine is the better explanation of whatever the driver saw
            raise
        finally:
            watch.finish()
        failed = [record for record in result.records if not record.completed]
        if failed:
            self.server.check()
        if len(failed) == len(result.records):
            raise EngineFailedError(
                f"all {len(failed)} requests at {cell.name} failed: {failed[0].error}; details are in {result.raw_path}"
            )
        return result


def _await_sample(sampler: Sampler, after_s: float) -> None:
    """Wait for a server sample later than `after_s`; without one the figures that need it stay None."""
    deadline = time.monotonic() + SAMPLE_WAIT_S
    while time.monotonic() < deadline:
        if sampler.timeline and sampler.timeline[-1]["t_s"] >= after_s:
            return
        time.sleep(0.05)


def _require_distinct_prompts(level: LoadLevel) -> None:
    rate = level.prefix_cache_hit_rate
    if rate is not None and rate > MAX_PREFIX_HIT_RATE:
        raise EngineFailedError(
            f"{rate:.1%} of the prompt tokens at concurrency {level.concurrency} came from the prefix cache "
            f"(at most {MAX_PREFIX_HIT_RATE:.0%}); the load's prompts are distinct, so its speed can't be trusted"
        )


class _Watch:
    """Called about once a second while a cell runs: looks after the engine and shows progress."""

    def __init__(self, cell: Cell, server: LoadedServer, sampler: Sampler, stall_timeout_s: float) -> None:
        self._cell = cell
        self._server = server
        self._sampler = sampler
        self._stall_timeout_s = stall_timeout_s
        self._started = self._checked = self._moved = time.monotonic()
        self._failed = 0
        self._sign: tuple[int, float] = (0, 0.0)
        self._progress = _Progress(cell)

    def __call__(self, ended: int, failed: int) -> None:
        now = time.monotonic()
        row = self._sampler.timeline[-1] if self._sampler.timeline else {}
        sign = (ended, row.get("generation_tokens_total") or 0.0)
        if sign != self._sign:
            self._sign, self._moved = sign, now
        if failed > self._failed or now - self._checked >= CHECK_INTERVAL_S:
            self._failed, self._checked = failed, now
            self._server.check()
        if now - self._moved >= self._stall_timeout_s:
            raise EngineFailedError(
                f"the server made no token for {self._stall_timeout_s:.0f} s at {self._cell.name}, "
                f"{ended} of {len(self._cell.prompts)} requests done"
            )
        self._progress.show(ended, failed, row)

    def finish(self) -> None:
        self._progress.end()


class _Progress:
    """One line of progress: rewritten in place on a terminal, else a new one every ten seconds."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._started = self._shown = time.monotonic()
        self._interactive = sys.stderr.isatty()
        self._line = ""

    def show(self, ended: int, failed: int, row: TimelineRow) -> None:
        now = time.monotonic()
        parts = [
            f"{self._cell.name}: {ended}/{len(self._cell.prompts)} requests",
            f"{now - self._started:.0f} s",
        ]
        if failed:
            parts.append(f"{failed} failed")
        parts += [
            f"{name} {row[key]:.0f}"
            for name, key in (("running", "running"), ("waiting", "waiting"))
            if _has(row, key)
        ]
        if _has(row, "kv_usage"):
            parts.append(f"KV {row['kv_usage']:.0%}")
        self._line = ", ".join(parts)
        if self._interactive:
            print(f"\r\033[K{self._line}", end="", file=sys.stderr, flush=True)
        elif now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            print(self._line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Close the line, if there is one."""
        if self._line:
            print(f"\r\033[K{self._line}" if self._interactive else self._line, file=sys.stderr, flush=True)


def _has(row: TimelineRow, key: str) -> bool:
    return row.get(key) is not None
