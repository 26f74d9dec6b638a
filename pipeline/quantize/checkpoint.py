"""The tensors of a model folder, quantized or not, whatever layout a backend wrote.

A layout is one module with `METHOD` (quant_method in config.json), `MARKER` (the tensor that a quantized module is known by),
`VALUES` (the one that holds its weights), `packed` and `check_config`. A further layout is a new module and an entry in `_LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.errors import QuantgateError
from pipeline.files import read_json
from pipeline.models.check import read_tensors
from pipeline.quantize import awq_format, compressed_format, float_format
from pipeline.quantize.packed import PackedLinear
from pipeline.settings.schema import QuantizeRecipe


class Format(Protocol):
    """One checkpoint layout."""

    METHOD: str
    MARKER: str
    VALUES: str

    def packed(self, module: str, raw: Callable[[str], torch.Tensor], names: Container[str]) -> PackedLinear:
        """The stored tensors of a quantized module."""

    def check_config(self, written: dict[str, Any], recipe: QuantizeRecipe) -> None:
        """Raise `QuantgateError` where config.json's quantization_config isn't what the recipe asks for."""


_LAYOUTS: dict[str, Callable[[dict[str, Any]], Format]] = {
    awq_format.METHOD: lambda written: awq_format,
    # Whether integers or floats, `format` says; a checkpoint with nothing but KV scales ("dense") is read as integers, and has none.
    compressed_format.METHOD: lambda written: (
        float_format if written.get("format") == float_format.FORMAT else compressed_format
    ),
}


def format_of(folder: Path) -> Format | None:
    """The layout that a folder's config.json names, None for an unquantized model; `QuantgateError` for an unknown one."""
    written = read_json(folder / "config.json").get("quantization_config")
    if written is None:
        return None
    method = written.get("quant_method")
    if method not in _LAYOUTS:
        raise QuantgateError(
            f"{folder / 'config.json'}: quantization_config.quant_method={method!r}; known are {', '.join(_LAYOUTS)}"
        )
    return _LAYOUTS[method](written)


class Checkpoint:
    """Tensors of a model folder by name, in float32; quantized modules come back dequantized."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self.format = format_of(folder)
        self._tensors = read_tensors(folder)
        self._files = {
            name: stack.enter_context(safe_open(folder / name, framework="pt"))
            for name in {tensor.file for tensor in self._tensors.values()}
        }

    def names(self) -> set[str]:
        return set(self._tensors)

    def raw(self, name: str) -> torch.Tensor:
        """The stored tensor; a missing one is a `QuantgateError`."""
        if name not in self._tensors:
            raise QuantgateError(f"{name} is missing from the checkpoint")
        tensor: torch.Tensor = self._files[self._tensors[name].file].get_tensor(name)
        return tensor

    def quantized_modules(self) -> set[str]:
        """Names of the modules whose weights are packed."""
        if self.format is None:
            return set()
        marker = f".{self.format.MARKER}"
        return {name.removesuffix(marker) for name in self._tensors if name.endswith(marker)}

    def packed_bits(self, module: str) -> int:
        """Bits that a quantized module's weights take, scales and zero points not counted."""
        assert self.format is not None
        tensor = self.raw(f"{module}.{self.format.VALUES}")
        return tensor.numel() * tensor.element_size() * 8

    def packed(self, module: str) -> PackedLinear:
        """The packed tensors of a quantized module."""
        if self.format is None:
            raise QuantgateError(f"{module} is not quantized: config.json has no quantization_config")
        return self.format.packed(module, self.raw, self._tensors)

    def __call__(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if self.format is not None and f"{module}.{self.format.MARKER}" in self._tensors:
            return self.packed(module).dequantize()
        return self.raw(name).to(torch.float32)
