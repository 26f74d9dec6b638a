"""compressed-tensors' layout "pack-quantized" with groups, unpacked in plain torch.

Per linear layer of shape (out, in): `weight_packed` int32 (out, in/8), `weight_scale` (out, in/group), `weight_zero_point`
int32 (out/8, in/group), `weight_shape` (2). Eight 4-bit values share an int32, the first in the lowest bits; scales and zero
points are packed along the outputs (compressed-tensors 0.19, compressors/pack_quantized: `pack_to_int32`). Weights and zero
points are stored with 8 added, which cancels: weight = (q - zero) * scale. A symmetric layer has no zero points: weight = (q - 8)
* scale. AWQ's and GPTQ's weights alike; GPTQ's `static` order leaves groups and columns where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.packed import BITS, VALUES_PER_WORD, check_scales, check_shapes
from pipeline.settings.schema import QuantizeRecipe

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
MARKER = VALUES = "weight_packed"
PARTS = ("weight_packed", "weight_scale", "weight_shape")
MIDDLE = 8


@dataclass(frozen=True)
class CompressedLinear:
    """The tensors of one quantized module as stored."""

    name: str
    weight: torch.Tensor
    scale: torch.Tensor
    shape: torch.Tensor
    zero_point: torch.Tensor | None = None
    """None: symmetric."""

    def group_size(self) -> int:
        """Input channels per scale, as the shapes say."""
        return int(self.weight.shape[1]) * VALUES_PER_WORD // int(self.scale.shape[1])

    def check(self, out_features: int, in_features: int, group_size: int | None) -> None:
        """Raise `QuantgateError` when a shape, a dtype or a scale can't belong to such a layer."""
        assert group_size is not None
        groups = in_features // group_size
        wanted = {
            "weight_packed": (self.weight, (out_features, in_features // VALUES_PER_WORD)),
            "weight_scale": (self.scale, (out_features, groups)),
        }
        if self.zero_point is not None:
            wanted["weight_zero_point"] = (self.zero_point, (out_features // VALUES_PER_WORD, groups))
        check_shapes(self.name, wanted, group_size)
        if self.shape.tolist() != [out_features, in_features]:
            raise QuantgateError(
                f"{self.name}.weight_shape says {self.shape.tolist()}, the architecture {[out_features, in_features]}"
            )
        for label, tensor in (("weight_packed", self.weight), ("weight_zero_point", self.zero_point)):
            if tensor is not None and tensor.dtype != torch.int32:
                raise QuantgateError(f"{self.name}.{label} must be int32, found {tensor.dtype}")
        check_scales(f"{self.name}.weight_scale", self.scale)

    def zero_points(self) -> torch.Tensor | None:
        """uint8 (out, in/group) with values 0..15; None where there are none."""
        return None if self.zero_point is None else unpack_rows(self.zero_point.t().contiguous()).t()

    def dequantize(self) -> torch.Tensor:
        """Float32 weight of shape (out, in)."""
        group_size = self.group_size()
        points = self.zero_points()
        zeros: torch.Tensor | float = float(MIDDLE)
        if points is not None:
            zeros = points.to(torch.float32).repeat_interleave(group_size, dim=1)
        scales = self.scale.to(torch.float32).repeat_interleave(group_size, dim=1)
        return (unpack_rows(self.weight).to(torch.float32) - zeros) * scales


def unpack_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 (rows, n) to uint8 (rows, 8n) with values 0..15, the lowest bits first."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).reshape(words.shape[0], -1).to(torch.uint8)


def packed(module: str, raw: Callable[[str], torch.Tensor], names: Container[str]) -> CompressedLinear:
    """The module's tensors, read with `raw`; `names` are those of the checkpoint."""
    zero_point = f"{module}.weight_zero_point"
    return CompressedLinear(
        module,
        *(raw(f"{module}.{part}") for part in PARTS),
        zero_point=raw(zero_point) if zero_point in names else None,
    )


def check_config(written: dict[str, Any], recipe: QuantizeRecipe) -> None:
    """What the engine will believe: one group of linear layers as the recipe says, and its KV scheme."""
    if recipe.quantizes_weights:
        wanted = {
            "num_bits": recipe.bits, "type": "int", "symmetric": not recipe.zero_point, "strategy": "group",
            "group_size": recipe.group_size,
        }  # fmt: skip
        check_group(written, FORMAT, {"weights": wanted})
    elif written.get("config_groups"):
        raise QuantgateError(
            "config.json: config_groups is not empty, but the recipe leaves the weights as they are"
        )
    check_kv_scheme(written, recipe)


def check_group(written: dict[str, Any], layout: str, parts: dict[str, dict[str, Any]]) -> None:
    """One group that takes every linear layer but the head, in this layout, with the arguments of each of `parts`."""
    groups = list((written.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise QuantgateError(f"config.json: {len(groups)} config_groups, the recipe makes one")
    for part, wanted in parts.items():
        require(f"config_groups.group_0.{part}", groups[0].get(part) or {}, wanted)
    if "input_activations" not in parts and groups[0].get("input_activations"):
        raise QuantgateError("config.json: config_groups.group_0 rounds activations, but the recipe doesn't")
    require("config_groups.group_0", groups[0], {"targets": ["Linear"]})
    require("", written, {"format": layout, "ignore": ["lm_head"]})


def check_kv_scheme(written: dict[str, Any], recipe: QuantizeRecipe) -> None:
    """FP8 KV scales as the recipe calibrates them, or none."""
    scheme = written.get("kv_cache_scheme")
    if recipe.calibrate_kv_scales:
        wanted = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        require("kv_cache_scheme", scheme or {}, wanted)
    elif scheme is not None:
        raise QuantgateError(
            "config.json: kv_cache_scheme is set, but the recipe calibrates no KV scales: an engine would take an FP8 KV cache"
        )


def require(where: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `QuantgateError` for the first key of `wanted` that `found`, the part `where` of the config, has otherwise."""
    prefix = f"quantization_config.{where}." if where else "quantization_config."
    for key, value in wanted.items():
        if found.get(key) != value:
            raise QuantgateError(
                f"config.json: {prefix}{key}={found.get(key)!r}, but the recipe asks for {value!r}"
            )
