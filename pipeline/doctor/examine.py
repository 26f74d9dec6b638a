"""All checks of a profile on this machine, in reading order."""

from __future__ import annotations

from typing import Any

from pipeline.doctor.cards import cards_of, check_cards
from pipeline.doctor.check import Check, guarded, ok
from pipeline.doctor.evalset import check_evalset
from pipeline.doctor.machine import (
    check_disk,
    check_memory,
    check_other_engine,
    check_ports,
    check_processor,
)
from pipeline.doctor.model import check_source, local_config
from pipeline.doctor.quantizing import check_leaks, check_overlap, check_room, check_tokens
from pipeline.doctor.scenario import check_kernels, check_plan, check_quantizers, check_time
from pipeline.doctor.software import check_environments
from pipeline.doctor.toolchain import check_toolchain
from pipeline.environments import locked, on_device
from pipeline.results import Environment
from pipeline.serving.engine import check_engine
from pipeline.settings import Settings


def examine(settings: Settings, machine: Environment, nvml: Any = None) -> list[Check]:
    """Every finding. `nvml` stands in for the module pynvml in tests."""
    settings = _with_geometry(settings)
    found: list[Check] = []
    if settings.device.kind == "cuda":
        found += guarded("GPU", lambda: check_cards(settings, nvml, locked(on_device("serve", "cuda"))))
    gpus = cards_of(settings, nvml)
    found += guarded("CPU", lambda: check_processor(settings, machine))
    if gpus or settings.device.kind == "cpu":
        found += guarded("other engine", lambda: check_other_engine(gpus))
    found += guarded("memory", lambda: check_memory(settings, machine))
    found += guarded("disk", lambda: check_disk(settings))
    found += guarded("ports", check_ports)
    found += guarded("environments", lambda: check_environments(settings))
    found += guarded("compilers", lambda: check_toolchain(settings, gpus))
    found += guarded("engine flags", lambda: ok("engine flags", check_engine(settings)))
    found += guarded("model", lambda: check_source(settings))
    found += guarded("quantizers", lambda: check_quantizers(settings))
    found += guarded("room", lambda: check_room(settings, nvml))
    found += guarded("calibration text", lambda: check_overlap(settings))
    found += guarded("calibration and eval items", lambda: check_leaks(settings))
    found += guarded("calibration tokens", lambda: check_tokens(settings))
    found += guarded("kernels", lambda: check_kernels(settings, machine, gpus))
    found += guarded("eval set", lambda: check_evalset(settings))
    found += guarded("plan", lambda: check_plan(settings))
    found += guarded("time", lambda: check_time(settings))
    return found


def _with_geometry(settings: Settings) -> Settings:
    """The settings with the config.json of a model that is at hand, where the conf gives no geometry."""
    if settings.model.config is not None:
        return settings
    config = local_config(settings)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"config": config})})
