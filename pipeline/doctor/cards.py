"""The cards: are they there, does their driver run the engine, how much of them is free, and who holds the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pipeline.capacity import GIB
from pipeline.compatibility.drivers import cuda_major, needed_driver
from pipeline.doctor.check import Check, ok, unfit, warn
from pipeline.errors import EnvironmentUnfitError, QuantgateError
from pipeline.gpu import NoDriver, Nvml, chosen, open_nvml
from pipeline.planning.calibrate import CARD_TOLERANCE_BYTES
from pipeline.planning.card import card_of, empty_card
from pipeline.results import Gpu, GpuProcess
from pipeline.settings import Settings

HELD_TOLERANCE_BYTES = GIB // 4
"""A driver's own contexts and an idle text console come and go in this range; a desktop holds 1 to 2 GiB."""


def cards_of(settings: Settings, library: Any) -> list[Gpu]:
    """The cards that the profile's engine would get; none where there aren't enough, which `check_cards` explains."""
    if settings.device.kind == "cpu":
        return []
    try:
        with open_nvml(library) as nvml:
            return chosen(nvml.gpus(), _count(settings))
    except QuantgateError:
        return []


def check_cards(settings: Settings, library: Any, serve_lock: dict[str, str]) -> Iterator[Check]:
    """All checks of the cards of a profile that serves on some."""
    device = settings.device
    wanted = f"the profile {settings.profile} serves on one ({device.name}, {device.memory_gib} GiB visible)"
    elsewhere = "run it on a machine with that card and its driver (nvidia-smi must list it); the profile demo needs none"
    try:
        with open_nvml(library) as nvml:
            gpus = nvml.gpus()
            if not gpus:
                yield unfit("GPU", f"the driver sees no card; {wanted}", elsewhere)
                return
            yield _driver(gpus[0], serve_lock)
            try:
                mine = chosen(gpus, _count(settings))
            except EnvironmentUnfitError as error:
                yield unfit("GPU", f"{error}; {wanted}", elsewhere)
                return
            for gpu in mine:
                yield _card(gpu, len(gpus))
                yield _memory(settings, gpu)
                yield _held(settings, gpu, nvml)
    except NoDriver as error:
        fix = elsewhere if error.absent else "repair the driver; nvidia-smi must list the card"
        yield unfit("GPU", f"{error}, so there is no card; {wanted}", fix)


def _count(settings: Settings) -> int:
    return settings.server.tensor_parallel * settings.server.pipeline_parallel


def _driver(gpu: Gpu, serve_lock: dict[str, str]) -> Check:
    major = cuda_major(serve_lock)
    needed, found = needed_driver(major), f"{gpu.driver}, runs CUDA up to {gpu.cuda}"
    if int(gpu.driver.split(".")[0]) < needed:
        return unfit(
            "driver", f"{found}; the engine is built with CUDA {major}", f"install driver {needed} or newer"
        )
    return ok("driver", f"{found}; the engine is built with CUDA {major}, which needs {needed}")


def _card(gpu: Gpu, count: int) -> Check:
    which = f" (card {gpu.index} of {count}; CUDA_VISIBLE_DEVICES chooses)" if count > 1 else ""
    found = f"{gpu.name}, {gpu.memory_visible_bytes / GIB:.2f} GiB visible, compute capability {gpu.compute_capability}{which}"
    if gpu.mig and not gpu.uuid.startswith("MIG-"):
        return unfit(
            "GPU",
            f"{found}: it is in MIG mode and has no slice",
            "make one (`nvidia-smi mig -cgi … -C`) or switch MIG off (`nvidia-smi -mig 0`)",
        )
    if gpu.mig:
        return warn(
            "GPU",
            f"{found}: a MIG slice, which shares power and clocks with its neighbours",
            "results are the slice's; use a whole card for figures of the card",
        )
    return ok("GPU", found)


def _memory(settings: Settings, gpu: Gpu) -> Check:
    device = settings.device
    found = f"{gpu.memory_visible_bytes / GIB:.2f} GiB visible, conf/device/{device.name}.yaml plans with {device.memory_gib}"
    away = gpu.memory_visible_bytes - device.memory_bytes
    fix = f"set device.memory_gib to {gpu.memory_visible_bytes / GIB:.2f}, in a conf/device/ file of its own"
    if abs(away) <= CARD_TOLERANCE_BYTES:
        return ok("card memory", found)
    if away < 0:
        return unfit("card memory", f"{found}: the plan counts on memory that isn't there", fix)
    return warn("card memory", f"{found}: the card has more", fix)


def _held(settings: Settings, gpu: Gpu, nvml: Nvml) -> Check:
    """What others hold, against what the engine asks for once its own context is on the card too (`Card.context`)."""
    card, held, free = empty_card(settings), nvml.held_bytes(gpu), nvml.free_bytes(gpu)
    context = card.context
    processes = nvml.processes(gpu)
    who = ", ".join(map(_named, processes)) or "no process that the driver names"
    found = f"{held / GIB:.2f} GiB are taken ({who}), {free / GIB:.2f} free"
    share = f"{card.utilization} of {gpu.memory_visible_bytes / GIB:.2f} GiB"
    asks = math.ceil(gpu.memory_visible_bytes * card.utilization)
    most = max(0, math.floor(100 * (free - context.high_bytes) / gpu.memory_visible_bytes)) / 100
    ends = f"end {processes[0].name or f'pid {processes[0].pid}'}" if processes else "free the card"
    fix = f"{ends}, or set device.memory_utilization to {most} at most"
    if asks > free - context.low_bytes:
        beside = f" beside its own context of {context.low_bytes / GIB:.2f} GiB" if context.low_bytes else ""
        return unfit(
            "memory held by others", f"{found}; the engine asks for {share}{beside} and refuses to start", fix
        )
    if asks > free - context.high_bytes:
        return warn(
            "memory held by others",
            f"{found}; the engine asks for {share} beside its own context of {context.low_bytes / GIB:.2f} to "
            f"{context.high_bytes / GIB:.2f} GiB, and may refuse to start",
            fix,
        )
    workspace = max(card_of(settings, one).workspace_bytes for one in settings.variants.values())
    if asks + workspace > free - context.value_bytes:
        room = math.floor(100 * (free - context.value_bytes - workspace) / gpu.memory_visible_bytes) / 100
        return warn(
            "memory held by others",
            f"{found}; the engine starts, and FlashInfer's workspace of {workspace / GIB:.2f} GiB comes on top of its share and context",
            f"set device.memory_utilization to {room} at most",
        )
    if held > card.held_bytes + HELD_TOLERANCE_BYTES:
        return warn(
            "memory held by others",
            f"{found}, planned with {card.held_bytes / GIB:.2f}",
            f"end them, or plan with device.held_gib={held / GIB:.1f}",
        )
    return ok("memory held by others", found)


def _named(process: GpuProcess) -> str:
    size = "unknown" if process.memory_bytes is None else f"{process.memory_bytes / 1024**2:,.0f} MiB"
    return f"{process.name or 'pid ' + str(process.pid)} {size}"
