"""Looks after a running cell: is the engine alive, does it make tokens, and what does the person at the terminal see."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell
from pipeline.load.metrics import TimelineRow
from pipeline.load.records import RequestRecord

CHECK_INTERVAL_S = 5.0
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

    def often(self, interval_s: float) -> AbstractContextManager[None]: ...


def never() -> bool:
    """A cell that runs to its end."""
    return False


class Watch:
    """The observer of every cell: keeps its records, checks the engine, shows progress, and asks `enough` whether to stop."""

    def __init__(
        self,
        cell: Cell,
        server: LoadedServer,
        sampler: Sampler,
        stall_timeout_s: float,
        *,
        see: Callable[[RequestRecord], None] | None = None,
        enough: Callable[[], bool] = never,
        title: str = "",
    ) -> None:
        self.records: list[RequestRecord] = []
        self._cell = cell
        self._server = server
        self._sampler = sampler
        self._stall_timeout_s = stall_timeout_s
        self._see = see
        self._enough = enough
        self._checked = time.monotonic()
        self._moved: float | None = (
            None  # from the first look on: a generator that isn't ready is no server that stands still
        )
        self._failed = self._failed_checked = 0
        self._sign: tuple[int, float] = (0, 0.0)
        self._progress = Progress(cell, title, may_stop=enough is not never)

    def request(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._failed += record.failed
        if self._see is not None:
            self._see(record)

    def tick(self) -> bool:
        now = time.monotonic()
        ended = len(self.records)
        row = self._sampler.timeline[-1] if self._sampler.timeline else {}
        sign = (ended, row.get("generation_tokens_total") or 0.0)
        if sign != self._sign or self._moved is None:
            self._sign, self._moved = sign, now
        if self._failed > self._failed_checked or now - self._checked >= CHECK_INTERVAL_S:
            self._failed_checked, self._checked = self._failed, now
            self._server.check()
        if now - self._moved >= self._stall_timeout_s:
            raise EngineFailedError(
                f"the server made no token for {self._stall_timeout_s:.0f} s at {self._cell.name}, "
                f"{ended} of {len(self._cell.requests)} requests done"
            )
        self._progress.show(ended, self._failed, row)
        return self._enough()

    def finish(self) -> None:
        """The cell is over, in whatever way."""
        self._progress.end()


class Progress:
    """The live view: one line, rewritten in place on a terminal, else a new one every ten seconds."""

    def __init__(self, cell: Cell, title: str, may_stop: bool) -> None:
        self._cell = cell
        self._title = title
        self._may_stop = may_stop
        self._started = self._shown = time.monotonic()
        self._interactive = sys.stderr.isatty()
        self._line = ""

    def show(self, ended: int, failed: int, row: TimelineRow) -> None:
        now = time.monotonic()
        self._line = progress_line(
            f"{self._title}{self._cell.name}",
            ended,
            len(self._cell.requests),
            failed,
            now - self._started,
            row,
            self._may_stop,
        )
        if self._interactive:
            print(f"\r\033[K{self._line}", end="", file=sys.stderr, flush=True)
        elif now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            print(self._line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Close the line, if there is one."""
        if self._line:
            print(f"\r\033[K{self._line}" if self._interactive else self._line, file=sys.stderr, flush=True)


def progress_line(
    name: str, ended: int, count: int, failed: int, elapsed_s: float, row: TimelineRow, may_stop: bool
) -> str:
    """The cell, its requests, what the server holds, and the time left (at most, where the cell may stop early)."""
    parts = [f"{name}: {ended}/{count} requests", f"{elapsed_s:.0f} s"]
    if failed:
        parts.append(f"{failed} failed")
    for label, key in (("running", "running"), ("waiting", "waiting")):
        if row.get(key) is not None:
            parts.append(f"{label} {row[key]:.0f}")
    if row.get("kv_usage") is not None:
        parts.append(f"KV {row['kv_usage']:.0%}")
    if 0 < ended < count:
        left_s = elapsed_s / ended * (count - ended)
        parts.append(f"{'at most ' if may_stop else ''}{left_s:.0f} s left")
    return ", ".join(parts)
