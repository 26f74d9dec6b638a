"""Wheels and source packages of one module each, for builds that need no network."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

# A backend of its own that needs the package `tinytool`, and writes the wheel that `write_wheel` would.
BACKEND = """import zipfile, tinytool
def build_wheel(folder, settings=None, metadata=None):
    name = "{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as archive:
        for path, text in {members!r}.items():
            archive.writestr(path, text)
    return name
"""
PROJECT = '[build-system]\nrequires = ["tinytool"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(folder: Path, name: str, version: str, text: str = "") -> str:
    """A wheel in `folder`; returns the hash as a lock has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in _members(name, version, text).items():
            archive.writestr(zipfile.ZipInfo(member), content)  # the same bytes at any time
    return _hash(path)


def write_source(folder: Path, name: str, version: str) -> str:
    """The same without a wheel: building it takes the package `tinytool`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.tar.gz"
    backend = BACKEND.format(name=name, version=version, members=_members(name, version, ""))
    files = {"backend.py": backend, "pyproject.toml": PROJECT, "PKG-INFO": _metadata(name, version)}
    with tarfile.open(path, "w:gz") as archive:
        for member, content in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{member}")
            entry.size = len(content.encode())
            archive.addfile(entry, io.BytesIO(content.encode()))
    return _hash(path)


def _members(name: str, version: str, text: str) -> dict[str, str]:
    info = f"{name}-{version}.dist-info"
    paths = [f"{name}.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
    return {
        paths[0]: f"VERSION = {version!r}\n{text}",
        paths[1]: _metadata(name, version),
        paths[2]: "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        paths[3]: "".join(f"{path},,\n" for path in paths),
    }


def _metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def _hash(path: Path) -> str:
    return f"--hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
