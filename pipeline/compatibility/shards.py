"""The linear modules of a model as one tensor-parallel rank holds them, alone and joined as the engine joins them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import Linear

ROW_PARALLEL = ("o_proj", "down_proj")
"""Split along their inputs, all others along their outputs (vLLM 0.32 model_executor/models/llama.py, RowParallelLinear)."""
JOINED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Modules that the engine multiplies as one (the same file, packed_modules_mapping)."""


@dataclass(frozen=True)
class Shard:
    """One module on one rank; fractions where the ranks don't divide it."""

    name: str
    inputs: float
    outputs: float


def shards(geometry: Geometry, ranks: int) -> list[Shard]:
    """Every shape of a quantized linear module, on one rank."""
    found: dict[Shard, None] = {}
    for layer in dict.fromkeys(geometry.layers):
        for linear in layer.linears(geometry.hidden):
            if linear.quantized:
                found[_shard(linear, ranks)] = None
    return list(found)


def joined(parts: list[Shard]) -> Iterator[Shard]:
    """The same with the modules joined that the engine multiplies as one."""
    sums: dict[tuple[str, float], float] = {}
    for part in parts:
        head, _, last = part.name.rpartition(".")
        name = f"{head}.{JOINED.get(last, last)}"
        sums[name, part.inputs] = sums.get((name, part.inputs), 0) + part.outputs
    for (name, inputs), outputs in sums.items():
        yield Shard(name, inputs, outputs)


def _shard(linear: Linear, ranks: int) -> Shard:
    outputs, inputs = linear.shape
    if linear.name.endswith(ROW_PARALLEL):
        return Shard(linear.name, inputs / ranks, outputs)
    over = ranks if linear.copied_beyond is None else min(ranks, linear.copied_beyond)
    return Shard(linear.name, inputs, outputs / over)
