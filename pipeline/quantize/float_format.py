"""compressed-tensors' layout "float-quantized" with a scale per output: FP8 weights, in plain torch.

Per linear layer of shape (out, in): `weight` float8_e4m3fn (out, in), `weight_scale` float32 (out, 1); weight = value * scale.
Activations are rounded when served, each token by its own largest magnitude (vLLM 0.32 input_quant_fp8.py), so nothing of
them is stored; `round_activations` does the same to a plain model, for the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import QuantgateError
from pipeline.quantize import compressed_format
from pipeline.quantize.compressed_format import check_group, check_kv_scheme
from pipeline.quantize.packed import check_scales, check_shapes
from pipeline.settings.schema import QuantizeRecipe

METHOD = compressed_format.METHOD
FORMAT = "float-quantized"
MARKER = "weight_scale"
VALUES = "weight"
FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class FloatLinear:
    """The tensors of one quantized module as stored."""

    name: str
    weight: torch.Tensor
    scale: torch.Tensor

    def group_size(self) -> int | None:
        """None: an output has one scale."""
        return None

    def check(self, out_features: int, in_features: int, group_size: int | None) -> None:
        """Raise `QuantgateError` when a shape, a dtype, a value or a scale can't belong to such a layer."""
        wanted = {
            "weight": (self.weight, (out_features, in_features)),
            "weight_scale": (self.scale, (out_features, 1)),
        }
        check_shapes(self.name, wanted, group_size)
        for label, tensor, dtype in (
            ("weight", self.weight, torch.float8_e4m3fn),
            ("weight_scale", self.scale, torch.float32),
        ):
            if tensor.dtype != dtype:
                raise QuantgateError(f"{self.name}.{label} must be {dtype}, found {tensor.dtype}")
        check_scales(f"{self.name}.weight_scale", self.scale)
        largest = self.weight.float().abs().amax(dim=1)
        idle = int(((largest > 0) & (largest < FP8_MAX / 2)).sum())
        if idle:
            raise QuantgateError(
                f"{self.name}.weight: {idle} of {out_features} outputs use less than half of the format's range; their scales "
                "aren't their own"
            )

    def zero_points(self) -> torch.Tensor | None:
        """None: a float has its sign."""
        return None

    def dequantize(self) -> torch.Tensor:
        """Float32 weight of shape (out, in)."""
        return self.weight.float() * self.scale.float()


def packed(module: str, raw: Callable[[str], torch.Tensor], names: Container[str]) -> FloatLinear:
    """The module's tensors, read with `raw`; they are always the same two."""
    return FloatLinear(module, raw(f"{module}.{VALUES}"), raw(f"{module}.{MARKER}"))


def check_config(written: dict[str, Any], recipe: QuantizeRecipe) -> None:
    """What the engine will believe: e4m3 weights by output, activations by token as they come, and the KV scheme."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    check_group(written, FORMAT, {"weights": weights, "input_activations": activations})
    check_kv_scheme(written, recipe)


def round_activations(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A forward pre-hook of a linear layer: its input (..., in) as the engine rounds it, each token to e4m3 by its own scale."""
    values = args[0].float()
    scales = (values.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    rounded = (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scales
    return (rounded.to(args[0].dtype), *args[1:])
