"""The FlashInfer that the engine's lock for a card names, for machines that haven't got that environment.

Its wheel (34 MB) has no compiled code and depends on no card, so it runs on the CPU environment's torch. Kept in our cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.doctor.software import locked
from pipeline.environments.build import SERVE_CUDA
from pipeline.files import cache_folder

PACKAGES = ("flashinfer-python", "nvidia-ml-py", "tabulate")
"""FlashInfer, and what it imports that the CPU environment lacks."""


def flashinfer_folder() -> Path:
    """A folder for PYTHONPATH with the locked FlashInfer in it, fetched where it isn't there yet."""
    lock = locked(SERVE_CUDA)
    folder = cache_folder("flashinfer-package", lock["flashinfer-python"])
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheels, unpacked = Path(scratch) / "wheels", Path(scratch) / "unpacked"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "-d", wheels]
            + [f"{package}==={lock[package]}" for package in PACKAGES],
            check=True,
        )  # fmt: skip
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        try:
            os.replace(unpacked, folder)
        except OSError:  # another test run was faster
            shutil.rmtree(unpacked)
    return folder
