"""The load driver's interface. A second driver is a new module, a line in `make_driver` and a conf entry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import UserInputError
from pipeline.load.records import RequestRecord

OnTick = Callable[[int, int], None]
"""(requests ended, of them failed) so far in the running cell. Called at least once a second; what it raises ends the cell."""


@dataclass(frozen=True)
class Target:
    """The server under load."""

    base_url: str
    served_name: str


@dataclass(frozen=True)
class Cell:
    """One closed-loop run: all prompts, at most `concurrency` in flight, greedy, exactly `output_tokens` each."""

    name: str
    concurrency: int
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    output_tokens: int


@dataclass(frozen=True)
class CellResult:
    """What a cell gave: one record per prompt, in the prompts' order, and the driver's own raw output."""

    cell: Cell
    records: tuple[RequestRecord, ...]
    raw_path: Path


class LoadSession(Protocol):
    """A driver made ready. Cells run one after another."""

    def run(self, target: Target, cell: Cell, on_tick: OnTick) -> CellResult:
        """Run one cell against a server. Raises `EngineFailedError` if its tokens can't be trusted or the driver broke down."""
        ...


class LoadDriver(Protocol):
    """A load generator."""

    def session(self, folder: Path) -> AbstractContextManager[LoadSession]:
        """Make it ready; its log and raw outputs go to `folder`. Leaving the context ends every process of it."""
        ...


def make_driver(name: str, python: str | Path) -> LoadDriver:
    """The driver of a conf name; `python` is the interpreter of the environment it runs in."""
    if name == "vllm-bench":
        from pipeline.load.vllm_bench import VllmBenchDriver

        return VllmBenchDriver(Path(python))
    raise UserInputError(f"load.driver {name!r} is unknown; vllm-bench is available")
