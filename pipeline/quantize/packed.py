"""What all layouts of quantized weights share: the interface of a module's tensors, and the checks of shapes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from pipeline.errors import QuantgateError

BITS = 4  # of an integer
VALUES_PER_WORD = 8  # an int32 holds eight


class PackedLinear(Protocol):
    """The stored tensors of one quantized linear module, whatever their layout."""

    def group_size(self) -> int | None:
        """Input channels per scale, as the shapes say; None where an output has one for all of them."""

    def check(self, out_features: int, in_features: int, group_size: int | None) -> None:
        """Raise `QuantgateError` when a shape, a dtype or a scale can't belong to such a layer."""

    def zero_points(self) -> torch.Tensor | None:
        """All zero points, uint8 with values 0..15; None for a symmetric layout, which stores none."""

    def dequantize(self) -> torch.Tensor:
        """Float32 weight of shape (out, in)."""


def check_shapes(
    name: str, wanted: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], group_size: int | None
) -> None:
    """Raise `QuantgateError` for the first of `wanted` (label -> tensor, shape) that has another shape."""
    how = (
        "8 bits with a scale per output" if group_size is None else f"{BITS} bits at group size {group_size}"
    )
    for label, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise QuantgateError(
                f"{name}.{label} has shape {list(tensor.shape)}, but {how} make it {list(shape)}"
            )


def check_scales(label: str, scales: torch.Tensor) -> None:
    """A zero scale makes a whole group vanish, a non-finite one poisons every output: `QuantgateError` for either."""
    bad = int((~torch.isfinite(scales)).sum())
    if bad:
        raise QuantgateError(f"{label}: {bad} of {scales.numel()} are NaN or infinite")
    bad = int((scales <= 0).sum())
    if bad:
        raise QuantgateError(f"{label}: {bad} of {scales.numel()} are zero or negative")
