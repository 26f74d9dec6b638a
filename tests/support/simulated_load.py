"""A load session without HTTP or wall time: a server of so many slots, first come first served, in virtual seconds.

Concurrency above the slots waits. `slowing` lets TPOT grow with the number running, `knee` lets it jump at a known number.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.load.driver import Cell, CellResult, Observer, Target
from pipeline.load.records import RequestRecord

TARGET = Target("http://simulated", "demo")


@dataclass
class SimulatedSession:
    """`run` as a driver's session has it. `sent` counts the requests of all cells, stopped ones included."""

    slots: int
    seed: int
    ttft_s: float = 0.2
    gap_s: float = 0.02
    slowing: float = 0.0
    """Added to each gap per request running when it is admitted, relative."""
    knee: int | None = None
    """With more than so many running the gaps double: a limit that is known exactly."""
    sigma: float = 0.2
    """Of the lognormal noise on each request's times."""
    sent: int = 0
    cells: list[Cell] = field(default_factory=list)

    def run(self, target: Target, cell: Cell, observer: Observer) -> CellResult:
        rng = random.Random(f"{self.seed}/{cell.name}/{len(self.cells)}")
        self.cells.append(cell)
        server = _Server(self, cell, rng)
        records: list[RequestRecord] = []
        stop = False
        while not stop and (ended := server.next_end()) is not None:
            records.append(ended)
            observer.request(ended)
            stop = observer.tick()
        records += server.stopped()
        self.sent += len(records)
        return CellResult(
            cell, tuple(sorted(records, key=lambda record: record.index)), Path("simulated.json"), 0.1
        )


class _Server:
    def __init__(self, session: SimulatedSession, cell: Cell, rng: random.Random) -> None:
        self._session = session
        self._cell = cell
        self._rng = rng
        self._now = 0.0
        self._running: list[tuple[float, int, RequestRecord]] = []
        self._waiting: list[tuple[float, int]] = []
        self._following = itertools.count()
        self._arrivals = list(enumerate(cell.arrivals_s or ()))
        for _ in range(cell.concurrency or 0):
            self._send()

    def _send(self, at_s: float | None = None) -> None:
        index = next(self._following)
        if index < len(self._cell.requests):
            self._waiting.append((self._now if at_s is None else at_s, index))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._session.slots:
            sent_s, index = self._waiting.pop(0)
            record = self._served(index, sent_s)
            heapq.heappush(self._running, (record.end_s, index, record))

    def _served(self, index: int, sent_s: float) -> RequestRecord:
        session = self._session
        noise = math.exp(self._rng.gauss(0, session.sigma))
        count = self._cell.requests[index].output_tokens
        gap_s = (
            session.gap_s
            * (1 + session.slowing * len(self._running))
            * math.exp(self._rng.gauss(0, session.sigma))
        )
        if session.knee is not None and len(self._running) >= session.knee:
            gap_s *= 2
        ttft_s = max(0.0, self._now - sent_s) + session.ttft_s * noise
        return RequestRecord(
            cell=self._cell.name,
            level=self._cell.concurrency,
            index=index,
            warmup=index < self._cell.warmup,
            scheduled_s=sent_s if self._cell.arrivals_s else None,
            start_s=sent_s,
            ttft_s=ttft_s,
            itls_s=(gap_s,) * (count - 1),
            chunk_tokens=(1,) * count,
            latency_s=ttft_s + gap_s * (count - 1),
            input_tokens=len(self._cell.requests[index].prompt),
            output_tokens=count,
            requested_output_tokens=count,
            error=None,
        )

    def next_end(self) -> RequestRecord | None:
        """The next request to end; in an open loop arrivals that come before it are taken in first."""
        while self._arrivals and (not self._running or self._arrivals[0][1] <= self._running[0][0]):
            _, self._now = self._arrivals.pop(0)
            self._send(self._now)
        if not self._running:
            return None
        self._now, _, record = heapq.heappop(self._running)
        if self._cell.concurrency is not None:
            self._send()
        self._admit()
        return record

    def stopped(self) -> list[RequestRecord]:
        """What is in flight when the cell is ended."""
        from dataclasses import replace

        cut = [record for _, _, record in self._running]
        cut += [self._served(index, sent_s) for sent_s, index in self._waiting]
        return [
            replace(
                record,
                stopped=True,
                input_tokens=None,
                output_tokens=None,
                latency_s=self._now - record.start_s,
            )
            for record in cut
        ]
