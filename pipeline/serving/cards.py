"""The cards of one server: which it gets, and what others held of them before it started and once it was ready."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import psutil

from pipeline.gpu import chosen, open_nvml
from pipeline.results import Gpu, GpuMemory, GpuProcess
from pipeline.serving.command import ServeSpec


def cards_of(spec: ServeSpec, library: Any = None) -> list[Gpu]:
    """The cards that `spec` runs on, none on a CPU; `EnvironmentUnfitError` where there aren't enough."""
    if spec.target == "cpu":
        return []
    with open_nvml(library) as nvml:
        return chosen(nvml.gpus(), spec.tensor_parallel * spec.pipeline_parallel)


def memory_before(gpus: Sequence[Gpu], library: Any = None) -> list[GpuMemory]:
    """What is held of the cards before the engine starts."""
    if not gpus:
        return []
    with open_nvml(library) as nvml:
        return [
            GpuMemory(
                uuid=gpu.uuid,
                name=gpu.name,
                visible_bytes=gpu.memory_visible_bytes,
                held_before_bytes=nvml.held_bytes(gpu),
                others_before=nvml.processes(gpu),
                others_after=None,
                changed_bytes=None,
            )
            for gpu in gpus
        ]


def memory_after(
    before: Sequence[GpuMemory], gpus: Sequence[Gpu], session: int, library: Any = None
) -> list[GpuMemory]:
    """The same completed once the engine is ready. `session`: the id of the session that its processes live in."""
    if not before:
        return []
    ours = _session_pids(session)
    with open_nvml(library) as nvml:
        return [_completed(old, nvml.processes(gpu), ours) for old, gpu in zip(before, gpus, strict=True)]


def _completed(before: GpuMemory, now: Sequence[GpuProcess], ours: set[int]) -> GpuMemory:
    if not any(process.pid in ours for process in now):
        return before  # the engine is there but not under our pids: nobody can be told apart from it
    others = [process for process in now if process.pid not in ours]
    sums = [_sum(before.others_before), _sum(others)]
    changed = None if None in sums else sums[1] - sums[0]  # type: ignore[operator]
    return before.model_copy(update={"others_after": others, "changed_bytes": changed})


def _sum(processes: Sequence[GpuProcess]) -> int | None:
    if any(process.memory_bytes is None for process in processes):
        return None
    return sum(process.memory_bytes or 0 for process in processes)


def _session_pids(session: int) -> set[int]:
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session:
                found.add(pid)
    return found
