"""AWQ's GEMM checkpoint layout, unpacked in plain torch: no GPU kernel, so any machine can check any checkpoint.

Per linear layer of shape (out, in): `qweight` int32 (in, out/8), `qzeros` int32 (in/group, out/8), `scales`
(in/group, out). Eight 4-bit values share an int32; nibble n of it holds output column [0,2,4,6,1,3,5,7][n]
(Lin et al., "AWQ", MLSys 2024, reference code; vLLM 0.32 awq_triton.py). weight = (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.packed import BITS, VALUES_PER_WORD, check_scales, check_shapes
from pipeline.settings.schema import QuantizeRecipe

NIBBLE_TO_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
METHOD = "awq"
MARKER = VALUES = "qweight"
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class AwqLinear:
    """The three tensors of one quantized module as stored."""

    name: str
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def group_size(self) -> int:
        """Input channels per scale, as the shapes say."""
        return int(self.qweight.shape[0]) // int(self.scales.shape[0])

    def check(self, out_features: int, in_features: int, group_size: int | None) -> None:
        """Raise `QuantgateError` when a shape, a dtype or a scale can't belong to such a layer."""
        assert group_size is not None
        groups, words = in_features // group_size, out_features // VALUES_PER_WORD
        wanted = {
            "qweight": (self.qweight, (in_features, words)),
            "qzeros": (self.qzeros, (groups, words)),
            "scales": (self.scales, (groups, out_features)),
        }
        check_shapes(self.name, wanted, group_size)
        if self.qweight.dtype != torch.int32 or self.qzeros.dtype != torch.int32:
            raise QuantgateError(f"{self.name}: qweight and qzeros must be int32, found {self.qweight.dtype}")
        check_scales(f"{self.name}.scales", self.scales)

    def zero_points(self) -> torch.Tensor:
        """uint8 (in/group, out) with values 0..15."""
        return unpack_words(self.qzeros)

    def dequantize(self) -> torch.Tensor:
        """Float32 weight of shape (out, in)."""
        group_size = self.group_size()
        quantized = unpack_words(self.qweight).to(torch.float32)
        zeros = self.zero_points().to(torch.float32).repeat_interleave(group_size, dim=0)
        scales = self.scales.to(torch.float32).repeat_interleave(group_size, dim=0)
        return ((quantized - zeros) * scales).t().contiguous()


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """int32 (rows, n) to uint8 (rows, 8n) with values 0..15, columns in their logical order."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 0xF
    ordered = torch.empty_like(nibbles)
    ordered[..., list(NIBBLE_TO_COLUMN)] = nibbles
    return ordered.reshape(words.shape[0], -1).to(torch.uint8)


def pack_words(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_words`: integers 0..15 of shape (rows, 8n) to int32 (rows, n)."""
    columns = values.reshape(values.shape[0], -1, VALUES_PER_WORD).to(torch.int64)[
        ..., list(NIBBLE_TO_COLUMN)
    ]
    shifts = torch.arange(0, 32, BITS, dtype=torch.int64, device=values.device)
    words = (columns << shifts).sum(dim=-1)
    # Python-style wrap into the signed range: bit 31 is a data bit here, not a sign.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def packed(module: str, raw: Callable[[str], torch.Tensor], names: Container[str]) -> AwqLinear:
    """The module's tensors, read with `raw`; they are always the same three."""
    return AwqLinear(module, *(raw(f"{module}.{part}") for part in PARTS))


def check_config(written: dict[str, Any], recipe: QuantizeRecipe) -> None:
    """What the engine will believe: bits, group size and zero point as the recipe says, and no module left out."""
    wanted = {"bits": recipe.bits, "group_size": recipe.group_size, "zero_point": recipe.zero_point}
    for key, value in wanted.items():
        if written.get(key) != value:
            raise QuantgateError(
                f"config.json: quantization_config.{key}={written.get(key)!r}, but the recipe asks for {value!r}"
            )
    if written.get("modules_to_not_convert"):
        raise QuantgateError(
            f"config.json: modules_to_not_convert={written['modules_to_not_convert']!r}, but every linear layer must be quantized"
        )
