"""A card under load: readings once a second, and what they come to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import TracebackType
from typing import Any

from pipeline.gpu.nvml import NoDriver, Nvml, open_nvml
from pipeline.results import Gpu, GpuLoad

INTERVAL_S = 1.0
"""NVML's own averages of power and utilization are over a sixth of a second to a second (nvml.h, nvmlUtilization_t)."""
SLOWED_BY = ("hardware slowdown", "heat", "heat, in hardware", "power brake")
"""Reasons that make a card slower than it should be. Its power limit isn't one: a card under full load sits there."""


class GpuSampler:
    """Reads some cards at most once in `interval_s`; a context, since NVML wants to be opened and closed.

    Called in between it answers None, as it does on a CPU (`gpus` empty): no reading is no reading, never an old one.
    """

    def __init__(self, gpus: Sequence[Gpu], interval_s: float = INTERVAL_S, library: Any = None) -> None:
        self.gpus = tuple(gpus)
        self.interval_s = interval_s
        self.power_limits_w: dict[str, float | None] = {}
        self._library = library
        self._stack = contextlib.ExitStack()
        self._nvml: Nvml | None = None
        self._due = 0.0

    def __enter__(self) -> GpuSampler:
        if self.gpus:
            with contextlib.suppress(NoDriver):
                self._nvml = self._stack.enter_context(open_nvml(self._library))
        if self._nvml is not None:
            self.power_limits_w = {gpu.uuid: self._nvml.power_limit_w(gpu) for gpu in self.gpus}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml = None
        self._stack.close()

    def __call__(self) -> list[dict[str, Any]] | None:
        """One dict per card (`Nvml.reading`) if a reading is due, else None."""
        now = time.monotonic()
        if self._nvml is None or now < self._due:
            return None
        following = self._due + self.interval_s
        self._due = following if following > now else now + self.interval_s
        return [found for gpu in self.gpus if (found := self._nvml.reading(gpu)) is not None] or None


def summarise(
    gpus: Sequence[Gpu],
    timeline: Sequence[Mapping[str, Any]],
    power_limits_w: Mapping[str, float | None] | None = None,
) -> list[GpuLoad] | None:
    """What a metrics timeline's `gpus` column comes to, over the rows in which requests ran; None without cards."""
    if not gpus:
        return None
    rows = [row["gpus"] for row in timeline if row.get("gpus") and row.get("running")]
    limits = power_limits_w or {}
    return [
        _summary(gpu, [r for row in rows for r in row if r["uuid"] == gpu.uuid], limits.get(gpu.uuid))
        for gpu in gpus
    ]


def _summary(gpu: Gpu, readings: Sequence[Mapping[str, Any]], limit_w: float | None) -> GpuLoad:
    def known(key: str) -> list[Any]:
        return [reading[key] for reading in readings if reading[key] is not None]

    def spread(key: str) -> tuple[int, float, int] | None:
        values = known(key)
        return (min(values), round(fmean(values), 1), max(values)) if values else None

    power, temperatures, utilizations = known("power_w"), known("temperature_c"), known("utilization")
    reasons = known("reasons")
    return GpuLoad(
        uuid=gpu.uuid,
        name=gpu.name,
        readings=len(readings),
        sm_clock_mhz=spread("sm_clock_mhz"),
        memory_clock_mhz=spread("memory_clock_mhz"),
        temperature_max_c=max(temperatures, default=None),
        power_mean_w=round(fmean(power), 1) if power else None,
        power_max_w=max(power, default=None),
        power_limit_w=limit_w,
        utilization_mean=round(fmean(utilizations), 3) if utilizations else None,
        slowed={name: share for name in SLOWED_BY if (share := _share(reasons, name))} if reasons else None,
        power_capped=_share(reasons, "power limit") if reasons else None,
    )


def _share(reasons: Sequence[Sequence[str]], name: str) -> float:
    return round(sum(name in found for found in reasons) / len(reasons), 4)
