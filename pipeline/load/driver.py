"""The load driver's interface. A second driver is a new module, a line in `make_driver` and a conf entry."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import UserInputError
from pipeline.load.records import RequestRecord


@dataclass(frozen=True)
class Target:
    """The server under load."""

    base_url: str
    served_name: str


@dataclass(frozen=True)
class Request:
    """One request: token ids in, exactly so many tokens out (the end-of-sequence token is ignored)."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Cell:
    """One run of requests in order, greedy. Closed loop: `concurrency` in flight. Open loop: sent at `arrivals_s`."""

    name: str
    requests: tuple[Request, ...]
    concurrency: int | None = None
    """Requests kept in flight; None in an open loop, whose client must not hold requests back."""
    warmup: int = 0
    """So many of the first requests only bring the cell to its load; the rest follow without a drain between."""
    stagger_s: float = 0.0
    """Between the starts of a closed loop's first requests: a herd of new connections would be measured as TTFT."""
    arrivals_s: tuple[float, ...] | None = None
    """Scheduled send times from the cell's start, ascending, one per request: an open loop."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals_s is None):
            raise ValueError(f"cell {self.name} must be either a closed or an open loop")
        if self.arrivals_s is not None and len(self.arrivals_s) != len(self.requests):
            raise ValueError(f"cell {self.name} needs one arrival per request")


@dataclass(frozen=True)
class CellResult:
    """What a cell gave: a record per request that was sent, by index, and where the driver's raw output is."""

    cell: Cell
    records: tuple[RequestRecord, ...]
    raw_path: Path
    client_cpu_share: float | None = None
    """CPU seconds of the client per second of the cell: near 1 the client, not the server, may be what is measured."""


class Observer(Protocol):
    """Watches a running cell. What it raises ends the cell."""

    def request(self, record: RequestRecord) -> None:
        """A request ended. In order of ending, not of sending."""
        ...

    def tick(self) -> bool:
        """Called at least once a second, and after each batch of ends. True: the cell has served, stop it now."""
        ...


class LoadSession(Protocol):
    """A driver that was started. Cells run one after another; the first waits until it is ready."""

    def run(self, target: Target, cell: Cell, observer: Observer) -> CellResult:
        """Run one cell against a server. Raises `EngineFailedError` if its tokens can't be trusted or the driver broke down."""
        ...


class LoadDriver(Protocol):
    """A load generator."""

    def session(self, folder: Path) -> AbstractContextManager[LoadSession]:
        """Start it; its log and raw outputs go to `folder`. Leaving the context ends every process of it."""
        ...


def make_driver(name: str, python: str | Path) -> LoadDriver:
    """The driver of a conf name; `python` is the interpreter of the environment it runs in."""
    if name == "vllm-bench":
        from pipeline.load.vllm_bench import VllmBenchDriver

        return VllmBenchDriver(Path(python))
    raise UserInputError(f"load.driver {name!r} is unknown; vllm-bench is available")
