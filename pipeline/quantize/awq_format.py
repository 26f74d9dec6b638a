"""AWQ's GEMM checkpoint layout, unpacked in plain torch: no GPU kernel, so any machine can check any checkpoint.

Per linear layer of shape (out, in): `qweight` int32 (in, out/8), `qzeros` int32 (in/group, out/8), `scales`
(in/group, out). Eight 4-bit values share an int32; nibble n of it holds output column [0,2,4,6,1,3,5,7][n]
(Lin et al., "AWQ", MLSys 2024, reference code; vLLM 0.32 awq_triton.py). weight = (q - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.errors import QuantgateError

NIBBLE_TO_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
VALUES_PER_WORD = 8
BITS = 4


@dataclass(frozen=True)
class PackedLinear:
    """The three tensors of one quantized module as stored."""

    name: str
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def group_size(self) -> int:
        """Input channels per scale, as the shapes say."""
        return int(self.qweight.shape[0]) // int(self.scales.shape[0])

    def check(self, out_features: int, in_features: int, group_size: int) -> None:
        """Raise `QuantgateError` when a shape, a dtype or a scale can't belong to such a layer.

        A zero scale makes a whole group vanish, a non-finite one poisons every output.
        """
        groups, words = in_features // group_size, out_features // VALUES_PER_WORD
        for tensor, label, shape in (
            (self.qweight, "qweight", (in_features, words)),
            (self.qzeros, "qzeros", (groups, words)),
            (self.scales, "scales", (groups, out_features)),
        ):
            if tuple(tensor.shape) != shape:
                raise QuantgateError(
                    f"{self.name}.{label} has shape {list(tensor.shape)}, but {BITS} bits at group size {group_size} "
                    f"make it {list(shape)}"
                )
        if self.qweight.dtype != torch.int32 or self.qzeros.dtype != torch.int32:
            raise QuantgateError(f"{self.name}: qweight and qzeros must be int32, found {self.qweight.dtype}")
        bad = int((~torch.isfinite(self.scales)).sum())
        if bad:
            raise QuantgateError(f"{self.name}.scales: {bad} of {self.scales.numel()} are NaN or infinite")
        bad = int((self.scales <= 0).sum())
        if bad:
            raise QuantgateError(f"{self.name}.scales: {bad} of {self.scales.numel()} are zero or negative")

    def dequantize(self) -> torch.Tensor:
        """Float32 weight of shape (out, in)."""
        group_size = self.group_size()
        quantized = unpack_words(self.qweight).to(torch.float32)
        zeros = unpack_words(self.qzeros).to(torch.float32).repeat_interleave(group_size, dim=0)
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
