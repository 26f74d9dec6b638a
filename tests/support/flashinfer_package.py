"""The FlashInfer that the engine's lock for a card names, for machines that haven't got that environment.

Its wheel (34 MB) has no compiled code and depends on no card, so it runs on the CPU environment's torch.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.environments.build import SERVE_CUDA, locked
from tests.support.wheels import unpacked

PACKAGES = ("flashinfer-python", "nvidia-ml-py", "tabulate")
"""FlashInfer, and what it imports that the CPU environment lacks."""


def flashinfer_folder() -> Path:
    """A folder for PYTHONPATH with the locked FlashInfer in it."""
    lock = locked(SERVE_CUDA)
    wanted = [f"{package}==={lock[package]}" for package in PACKAGES]
    return unpacked(f"flashinfer-{lock['flashinfer-python']}", wanted)
