"""W: bytes of the weights, from geometry and scheme, for when no checkpoint is at hand to be counted.

Embeddings, lm_head, norms and biases stay at 16 bits, as the published AWQ checkpoints have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.capacity.geometry import QKV_BIAS, Geometry
from pipeline.errors import UserInputError


@dataclass(frozen=True)
class WeightScheme:
    """How linear weights are stored. `bits` 16 means unquantized; `group_size` counts input features per scale."""

    bits: int
    group_size: int | None = None
    zero_point: bool = True


def weight_bytes(geometry: Geometry, scheme: WeightScheme) -> int:
    """Bytes of all tensors under `scheme`.

    AWQ (AutoAWQ's GEMM layout): per group of `group_size` input features and output feature one FP16 scale and one
    `bits`-wide zero point, beside `bits` per weight.
    """
    shapes = geometry.linear_shapes.values()
    linear = geometry.layers * sum(rows * columns for rows, columns in shapes)
    if scheme.bits == 16:
        linear_bytes = 2 * linear
    elif scheme.bits == 4 and scheme.group_size:
        for rows, columns in shapes:
            if columns % scheme.group_size:
                raise UserInputError(
                    f"group_size {scheme.group_size} doesn't divide {columns}, the input width of a {rows}x{columns} "
                    f"module of {geometry.architecture}"
                )
        groups = linear // scheme.group_size
        linear_bytes = linear // 2 + 2 * groups + (groups // 2 if scheme.zero_point else 0)
    else:
        raise UserInputError(
            f"weights of {scheme.bits} bits, group size {scheme.group_size}: allowed are 16, or 4 with groups"
        )
    embeddings = geometry.vocabulary * geometry.hidden * (1 if geometry.tied_embeddings else 2)
    norms = (2 * geometry.layers + 1) * geometry.hidden
    biases = 0
    if geometry.architecture in QKV_BIAS:
        biases = geometry.layers * (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    return linear_bytes + 2 * (embeddings + norms + biases)
