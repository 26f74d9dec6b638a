"""An NVIDIA card as vLLM's own CUDA platform would see it, on a machine without one. For processes of the serve environment.

What decides is the installed vLLM's: its CUDA platform class, its attention selector and backends' own conditions, its choice of
linear kernel, its model classes. What is stood in for: the answers of the driver (compute capability, name, memory), the
compiled kernels (never called here), and the package `flashinfer`, which every CUDA installation of vLLM has and a CPU one lacks:
where the real one is on the path (`flashinfer_package`) it is taken, and compiles, or can't, as on a card.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C")
# What the compiled library answers for compute capability 8.9 (csrc/.../cutlass/scaled_mm_entry.cu): FP8 yes; block FP8 and
# FP4 need 9.0 and 10.0.
QUERIES = {
    "cutlass_scaled_mm_supports_fp8": True,
    "cutlass_scaled_mm_supports_block_fp8": False,
    "cutlass_scaled_mm_supports_fp4": False,
    "cutlass_group_gemm_supported": False,
}

CUDA_OF_TORCH = "13.0"  # of the torch that the lock for a card names: it asks for cuda-toolkit 13.0


@dataclass(frozen=True)
class Card:
    """What the driver says of a card."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int


class _StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    """Finds what a CPU installation lacks."""

    def __init__(self) -> None:
        self.stands_for_flashinfer = importlib.machinery.PathFinder.find_spec("flashinfer") is None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in COMPILED or (
            self.stands_for_flashinfer and name.split(".", maxsplit=1)[0] == "flashinfer"
        ):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _Kernels:
    """`torch.ops._C` as a CUDA installation has it: each kernel has a name, and none may be called."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in QUERIES:
            return lambda *_: QUERIES[name]
        try:
            return getattr(self._real, name)
        except AttributeError:
            return _uncallable(name)


def _uncallable(name: str) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"the kernel {name} can't run here: there is no card")

    return kernel


def emulate(card: Card) -> None:
    """Make `card` vLLM's current platform. Before anything else of vLLM is imported."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    # FlashInfer asks the driver itself, unless it is told.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ".".join(map(str, card.capability))
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class EmulatedPlatform(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*card.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return card.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return card.memory_bytes

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return card.multiprocessors

        @classmethod
        def import_kernels(cls) -> None:
            """None to import."""

    vllm.platforms._current_platform = EmulatedPlatform()
    import vllm._custom_ops

    torch.ops.__dict__["_C"] = _Kernels(torch.ops._C)
    torch.accelerator.current_device_index = lambda: 0
    torch.empty, torch.Tensor.pin_memory = _unpinned(torch.empty), lambda tensor: tensor
    torch.version.cuda = CUDA_OF_TORCH


def _unpinned(empty: Any) -> Any:
    """`torch.empty` without the one thing that only a driver can give: memory that it pinned."""

    @functools.wraps(empty)
    def wrapped(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return empty(*args, **kwargs)

    return wrapped
