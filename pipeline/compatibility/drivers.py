"""Which NVIDIA driver an engine's wheel needs."""

from __future__ import annotations

from collections.abc import Mapping

DRIVER_OF_CUDA = {13: 580, 12: 525, 11: 450}
"""CUDA major version -> first driver branch that runs everything built with it (docs.nvidia.com/deploy/cuda-compatibility,
minor version compatibility, table 1, 2026)."""
CUDA_OF_ENGINE = 13
"""Of the vllm 0.32.0 wheel on PyPI: it asks for nvidia-cutlass-dsl[cu13]."""
RUNTIMES = ("cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")


def cuda_major(locked: Mapping[str, str]) -> int:
    """The CUDA major version that a serve environment's lock brings, the engine wheel's where it names no runtime."""
    for name in RUNTIMES:
        if name in locked:
            return int(locked[name].split(".")[0])
    return CUDA_OF_ENGINE


def needed_driver(major: int) -> int:
    """The first driver branch for a CUDA major version; newer ones than are known count as the newest known."""
    return DRIVER_OF_CUDA.get(major, max(DRIVER_OF_CUDA.values()))
