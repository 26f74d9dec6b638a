"""kappa and the KV pool in whole blocks, as vLLM counts them.

Source: vLLM 0.32 v1/core/kv_cache_utils.py (blocks = bytes // page size over all layers; tokens = blocks * block
size) and v1/core/block_pool.py (one block is taken as the null block at start, so it never holds a sequence).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeline.capacity.geometry import Geometry
from pipeline.errors import UserInputError

# Bytes per KV element by the engine's --kv-cache-dtype value (vLLM 0.32 utils/torch_utils.py).
KV_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def kappa_bytes(geometry: Geometry, kv_cache_dtype: str, tensor_parallel: int = 1) -> int:
    """KV bytes per token and rank: 2 (K and V) * layers * KV heads per rank * head_dim * bytes per element."""
    if kv_cache_dtype not in KV_ELEMENT_BYTES:
        raise UserInputError(
            f"kv_cache_dtype is {kv_cache_dtype!r}; allowed are {', '.join(KV_ELEMENT_BYTES)}"
        )
    heads_per_rank = max(1, geometry.kv_heads // tensor_parallel)
    return 2 * geometry.layers * heads_per_rank * geometry.head_dim * KV_ELEMENT_BYTES[kv_cache_dtype]


@dataclass(frozen=True)
class KvPool:
    """A pool of `blocks` blocks of `block_size` tokens, read at `max_model_len` tokens per sequence."""

    blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        """What the engine's log says."""
        return self.blocks * self.block_size

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens takes, the last one rounded up."""
        return -(-self.max_model_len // self.block_size)

    @property
    def logged_sequences(self) -> Fraction:
        """ "Maximum concurrency" of the engine's log: blocks / blocks per sequence, the null block not deducted."""
        return Fraction(self.blocks, self.blocks_per_sequence)

    @property
    def fitting_sequences(self) -> int:
        """Whole sequences that really fit, the null block deducted."""
        return max(0, self.blocks - 1) // self.blocks_per_sequence


def kv_pool(budget_bytes: int, kappa: int, block_size: int, max_model_len: int) -> KvPool:
    """The pool that `budget_bytes` holds at `kappa` bytes per token, in whole blocks."""
    for name, value in (("kappa", kappa), ("block_size", block_size), ("max_model_len", max_model_len)):
        if value <= 0:
            raise UserInputError(f"{name} is {value}, it must be positive")
    return KvPool(max(0, budget_bytes) // (kappa * block_size), block_size, max_model_len)
