"""The machine around the engine: processor, memory, disks, ports, an engine that already runs."""

from __future__ import annotations

import configparser
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants

from pipeline.capacity import GIB, Geometry, weight_bytes
from pipeline.doctor.check import Check, ok, unfit, warn
from pipeline.environments.build import environment_folder, is_complete, needed_bytes
from pipeline.environments.needed import environments_of
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.files import cache_folder
from pipeline.models.source import hub_folder
from pipeline.planning.scenario import geometry_of, scheme_of
from pipeline.results import Environment, Gpu
from pipeline.runs import RUNS
from pipeline.serving.lease import engine_leases
from pipeline.settings import Settings
from pipeline.settings.schema import HubSource, LocalSource

SLACK_BYTES = 2 * GIB  # logs, results, the engine's compiled kernels
MLFLOW_PORT = 5000


def check_processor(settings: Settings, machine: Environment) -> Check:
    found = f"{machine.cpu_model}, {machine.cpu_count} cores"
    if settings.device.kind == "cuda":
        return ok("CPU", found)
    if "avx2" not in machine.cpu_flags:
        return unfit("CPU", f"{machine.cpu_model} has no AVX2", "vLLM's CPU build needs an x86 CPU with AVX2")
    if "avx512f" in machine.cpu_flags:
        return ok("CPU", f"{found}, AVX-512: int4 and FP8 KV have stock kernels")
    return ok("CPU", f"{found}, no AVX-512: int4 and FP8 KV run emulated, labelled so")


def check_memory(settings: Settings, machine: Environment) -> Check:
    """What serving takes; what a quantizer takes is its own check.

    The engine's processes and torch take about 3 GiB before any weight (measured on a 2-core CPU with vLLM 0.32.0).
    """
    needed = 4 * GIB + (2 * settings.device.memory_bytes if settings.device.kind == "cpu" else 0)
    found = f"{machine.memory_bytes / GIB:.1f} GiB of RAM, {needed / GIB:.1f} needed for serving"
    if machine.memory_bytes < needed:
        return unfit("memory", found, "use a machine with more memory")
    return ok("memory", found)


def check_disk(settings: Settings) -> Iterator[Check]:
    """Room on each file system that gets something: checkpoints, DVC's copy of them, a download, environments."""
    wanted: dict[int, list[tuple[str, int, Path]]] = {}
    for what, size, folder in _takers(settings):
        wanted.setdefault(_disk(folder), []).append((what, size, _existing(folder)))
    for takers in wanted.values():
        place = takers[0][2]
        free, needed = shutil.disk_usage(place).free, sum(size for _, size, _ in takers)
        listed = ", ".join(f"{what} {size / GIB:.1f}" for what, size, _ in takers if size)
        found = f"{place}: {free / GIB:.1f} GiB free, {needed / GIB:.1f} needed ({listed})"
        if free < needed:
            yield unfit(
                "disk", found, "free some, or clone to a larger disk (XDG_CACHE_HOME moves environments)"
            )
        else:
            yield ok("disk", found)


def check_ports() -> Iterator[Check]:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            yield unfit(
                "ports", f"no port of 127.0.0.1 can be bound ({error.strerror})", "allow local sockets"
            )
            return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", MLFLOW_PORT))
        except OSError:
            yield warn(
                "ports",
                f"{MLFLOW_PORT} of 127.0.0.1 is taken; the engine takes a free one, `make ui` doesn't",
                "use `quantgate ui --port N`, unless it's an MLflow of ours",
            )
            return
    yield ok("ports", f"local ports can be bound, {MLFLOW_PORT} is free for MLflow")


def check_other_engine(gpus: list[Gpu]) -> Check:
    """Whether another engine of this user runs here: a stage would wait for it."""
    where = "on the card" if gpus else "on this machine"
    try:
        with engine_leases([gpu.uuid for gpu in gpus], timeout_s=0.0):
            return ok("other engine", f"none of this project's {where}")
    except EnvironmentUnfitError as error:
        holder = str(error).split(" still holds ")[0]
        return warn("other engine", f"{holder} runs {where}", "stages wait for it up to an hour; or end it")


def _takers(settings: Settings) -> Iterator[tuple[str, int, Path]]:
    """(what, bytes, where) still to come."""
    yield "logs and results", SLACK_BYTES, Path.cwd()
    if settings.model.config is not None:
        yield from _checkpoints(settings, RUNS / settings.profile / "weights")
    unbuilt = [name for name in environments_of(settings) if not is_complete(environment_folder(name))]
    yield f"environments ({', '.join(unbuilt)})", sum(map(needed_bytes, unbuilt)), cache_folder()


def _checkpoints(settings: Settings, weights: Path) -> Iterator[tuple[str, int, Path]]:
    """Those that aren't there yet. One from a folder on the same disk is linked, not copied (models/prepare.py); DVC copies."""
    geometry, source = geometry_of(settings), settings.model.source
    sizes = {name: _size(settings, geometry, name) for name in ("bf16", *settings.quantizers)}
    missing = {name: size for name, size in sizes.items() if not (weights / name).is_dir()}
    total = sum(missing.values())
    original = missing.get("bf16", 0)
    linked = 0
    if original and isinstance(source, HubSource):
        place = Path(huggingface_hub.constants.HF_HUB_CACHE)
        yield "download", original if hub_folder(source) is None else 0, place
        linked = original if _disk(place) == _disk(weights) else 0
    elif original and isinstance(source, LocalSource):
        linked = original if _disk(Path(source.path).expanduser()) == _disk(weights) else 0
    yield "checkpoints", total - linked, weights
    yield "DVC's copies", total, _dvc_cache()


def _size(settings: Settings, geometry: Geometry, scheme: str) -> int:
    """Bytes of a checkpoint; of a scheme that can't be made, which the quantizer's check says, those of the original."""
    try:
        return weight_bytes(geometry, scheme_of(settings, scheme))
    except UserInputError:
        return weight_bytes(geometry, scheme_of(settings, "bf16"))


def _disk(folder: Path) -> int:
    """The file system that a folder is on, or will be."""
    return os.stat(_existing(folder)).st_dev


def _dvc_cache() -> Path:
    """DVC's cache folder, as .dvc/config or .dvc/config.local set it (dvc.org/doc, config: cache.dir)."""
    found = ".dvc/cache"
    for name in ("config", "config.local"):
        parser = configparser.ConfigParser()
        parser.read(Path(".dvc") / name, encoding="utf-8")
        found = parser.get("cache", "dir", fallback=found)
    path = Path(found).expanduser()
    return path if path.is_absolute() or found.startswith(".dvc/") else Path(".dvc") / path


def _existing(folder: Path) -> Path:
    """The nearest folder at or above this one that is there."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return path
