"""The environments: built, and still what their locks say."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from pipeline.doctor.check import Check, ok, unfit, warn
from pipeline.environments.build import environment_folder, is_complete, locked
from pipeline.environments.needed import environments_of
from pipeline.environments.owners import clashes, describe
from pipeline.files import cache_folder
from pipeline.settings import Settings

SHOWN = 4


def installed(folder: Path) -> dict[str, str]:
    """Package -> version of what an environment holds, read from its metadata."""
    places = [str(path) for path in (folder / "lib").glob("python3.*/site-packages")]
    return {
        canonicalize_name(found.name): found.version for found in distributions(path=places) if found.name
    }


def check_environments(settings: Settings) -> Iterator[Check]:
    for name in environments_of(settings):
        yield check_environment(name, environment_folder(name))


def check_environment(name: str, folder: Path) -> Check:
    """Whether an environment holds exactly what its lock says: every result names the lock's versions."""
    title = f"environment {name}"
    if not is_complete(folder):
        return warn(title, "not built yet", f"`make environments` builds it in {cache_folder()}")
    wanted, found = locked(name), installed(folder)
    missing = sorted(wanted.keys() - found.keys())
    other = [
        f"{package} {found[package]} instead of {version}"
        for package, version in sorted(wanted.items())
        if package in found and found[package] != version
    ]
    surplus = sorted(found.keys() - wanted.keys())
    again = f"remove {folder} and run `make environments`"
    if missing or other:
        lacks = [f"{package} is missing" for package in missing]
        return unfit(title, f"isn't what its lock says: {_some([*other, *lacks])}", again)
    if shared := clashes(folder):
        return unfit(title, f"{describe(shared)}, and chance decided whose are there", again)
    if surplus:
        return warn(title, f"holds what its lock doesn't: {_some(surplus)}", again)
    return ok(title, f"{len(wanted)} packages, as locked")


def _some(parts: list[str]) -> str:
    return ", ".join(parts[:SHOWN]) + (f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")
