"""Cells for the load generator, an observer that keeps what it is told, and a mock that can be asked whether it lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import EngineFailedError
from pipeline.load.driver import Cell, CellResult, LoadSession, Target
from pipeline.load.records import RequestRecord
from pipeline.load.workload import make_source
from pipeline.settings.schema import FixedWorkload
from tests.support.mock_vllm import MockServer

TOKENS = 16


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


def closed_cell(model: Path, concurrency: int, count: int, tokens: int = TOKENS, **options: Any) -> Cell:
    workload = FixedWorkload(kind="fixed", input_tokens=100, output_tokens=tokens)
    name = f"level-{concurrency}"
    requests = make_source(workload, model, 1, 2048).requests(name, count)
    return Cell(name, requests, concurrency=concurrency, **options)


def run_cell(session: LoadSession, mock: MockServer, cell: Cell, stop_after: int | None = None) -> CellResult:
    return session.run(Target(mock.base_url, mock.served_name), cell, Seen(stop_after))
