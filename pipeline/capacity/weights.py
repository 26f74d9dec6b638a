"""W: bytes of the weights, from geometry and scheme, for when no checkpoint is at hand to be counted.

Embeddings, lm_head, norms, biases and routers stay at 16 bits, as published AWQ and GPTQ checkpoints have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import Linear
from pipeline.capacity.pool import pipeline_ranks
from pipeline.errors import UserInputError

Method = Literal["none", "awq", "gptq", "pack-quantized", "fp8", "float-quantized"]
VOCABULARY_PADDING = 64
"""Rows that embeddings and lm_head are padded to a multiple of on each rank (vLLM layers/vocab_parallel_embedding.py)."""


@dataclass(frozen=True)
class WeightScheme:
    """How linear weights are stored.

    `awq`, `gptq`: `bits` per weight; per group of `group_size` input features and output feature one FP16 scale and, for
    AWQ always and for GPTQ as its format has it, one `bits`-wide zero point; GPTQ adds one INT32 group index per input feature.
    `pack-quantized` (compressed-tensors, AWQ's and GPTQ's weights alike): as `awq` with scales of 16 bits, zero points only where
    there are some, and two INT64 per module that hold its shape.
    `fp8`: one byte per weight, one FP32 scale per module. `float-quantized` (compressed-tensors, channel strategy): one byte per
    weight, one FP32 scale per output feature, the dtype that the engine keeps them in (vLLM 0.32
    layers/quantization/utils/fp8_utils.py, create_fp8_scale_parameter).
    `kv_scales`: each layer carries a 16-bit scale for its keys and one for its values.
    """

    method: Method
    bits: int = 16
    group_size: int | None = None
    zero_point: bool = True
    kv_scales: bool = False

    def module_bytes(self, linear: Linear) -> int:
        """Bytes of one module's weight and its scales, its bias not included."""
        rows, columns = linear.shape
        if self.method == "none" or not linear.quantized:
            return 2 * rows * columns
        if self.method == "fp8":
            return rows * columns + 4
        if self.method == "float-quantized":
            return rows * columns + 4 * rows
        if self.bits not in (4, 8) or not self.group_size:
            raise UserInputError(
                f"{self.method} weights of {self.bits} bits, group size {self.group_size}: allowed are 4 or 8 bits with groups"
            )
        if columns % self.group_size:
            raise UserInputError(
                f"group_size {self.group_size} doesn't divide {columns}, the input width of a {rows}x{columns} module ({linear.name})"
            )
        groups = rows * columns // self.group_size
        zeros = groups * self.bits // 8 if self.zero_point or self.method == "gptq" else 0
        index = {"gptq": 4 * columns, "pack-quantized": 16}.get(self.method, 0)
        return rows * columns * self.bits // 8 + 2 * groups + zeros + index


BF16 = WeightScheme("none")


def weight_bytes(geometry: Geometry, scheme: WeightScheme = BF16) -> int:
    """Bytes of all tensors of the checkpoint under `scheme`."""
    _computable(geometry)
    layers = sum(_layer_bytes(geometry, index, scheme, 1) for index in range(len(geometry.layers)))
    tables = geometry.vocabulary * geometry.hidden * (1 if geometry.tied_embeddings else 2)
    return layers + 2 * (tables + geometry.hidden)


def rank_weight_bytes(
    geometry: Geometry, scheme: WeightScheme = BF16, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> tuple[int, ...]:
    """Bytes on a rank of each pipeline stage. Modules are split, norms and what has fewer KV heads than ranks is copied."""
    _computable(geometry)
    rows = math.ceil(geometry.vocabulary / VOCABULARY_PADDING) * VOCABULARY_PADDING // tensor_parallel
    table = 2 * rows * geometry.hidden if tensor_parallel > 1 else 2 * geometry.vocabulary * geometry.hidden
    found = []
    for rank, layers in enumerate(pipeline_ranks(len(geometry.layers), pipeline_parallel)):
        size = sum(_layer_bytes(geometry, index, scheme, tensor_parallel) for index in layers)
        first, last = rank == 0, rank == pipeline_parallel - 1
        tied_here = geometry.tied_embeddings and first and last
        size += table * (first + last - tied_here) + (2 * geometry.hidden if last else 0)
        found.append(size)
    return tuple(found)


def _computable(geometry: Geometry) -> None:
    if not geometry.computable_weights:
        raise UserInputError(
            f"{geometry.architecture}: its config describes more than the decoder, so its weights can only be counted from a checkpoint"
        )


def _layer_bytes(geometry: Geometry, index: int, scheme: WeightScheme, tensor_parallel: int) -> int:
    layer = geometry.layers[index]
    total = 2 * (layer.norm_elements + layer.mixer.other_elements) + (4 if scheme.kv_scales else 0)
    for linear in layer.linears(geometry.hidden):
        size = scheme.module_bytes(linear) + (2 * linear.shape[0] if linear.bias else 0)
        shards = tensor_parallel
        if linear.copied_beyond is not None:
            shards = min(tensor_parallel, linear.copied_beyond)
        total += math.ceil(size / shards)
    return total
