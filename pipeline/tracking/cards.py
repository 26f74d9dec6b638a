"""What MLflow gets of the cards: nothing from a CPU, the worst of several cards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.report.cards import is_changed, is_slowed
from pipeline.results import Provenance


def card_figures(origin: Provenance | None) -> dict[str, float | None]:
    """Clocks in MHz, power in W, temperature in degrees Celsius, shares 0..1, memory in bytes."""
    loads = (origin.gpu_load if origin else None) or []
    memories = (origin.gpu_memory if origin else None) or []
    slowed = [max(load.slowed.values(), default=0.0) for load in loads if load.slowed is not None]
    return {
        "gpu/sm_clock_mean_mhz": _worst(min, (load.sm_clock_mhz and load.sm_clock_mhz[1] for load in loads)),
        "gpu/sm_clock_min_mhz": _worst(min, (load.sm_clock_mhz and load.sm_clock_mhz[0] for load in loads)),
        "gpu/temperature_max_c": _worst(max, (load.temperature_max_c for load in loads)),
        "gpu/power_mean_w": _worst(max, (load.power_mean_w for load in loads)),
        "gpu/utilization_mean": _worst(min, (load.utilization_mean for load in loads)),
        "gpu/power_capped_share": _worst(max, (load.power_capped for load in loads)),
        "gpu/slowed_share": _worst(max, slowed),
        "gpu/held_by_others_bytes": _worst(max, (memory.held_before_bytes for memory in memories)),
    }


def card_tags(origin: Provenance | None) -> dict[str, str]:
    """`gpu_slowed` and `gpu_memory_moved`: yes or no; left out where it isn't known."""
    loads = [load for load in (origin.gpu_load if origin else None) or [] if load.slowed is not None]
    memories = [
        memory for memory in (origin.gpu_memory if origin else None) or [] if memory.changed_bytes is not None
    ]
    tags = {}
    if loads:
        tags["gpu_slowed"] = "yes" if any(map(is_slowed, loads)) else "no"
    if memories:
        tags["gpu_memory_moved"] = "yes" if any(map(is_changed, memories)) else "no"
    return tags


def _worst(which: Callable[..., float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return which(known) if known else None
