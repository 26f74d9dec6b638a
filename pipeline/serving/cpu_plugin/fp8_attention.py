"""Attention over an FP8 (e4m3) KV cache for x86 CPUs whose vLLM kernels only read the model's own dtype.

The cache tensor stays one byte per element, so the pool has its real size, and every key and value is rounded to FP8 once, as
it is written. At each step the blocks in use are widened into a scratch cache of one layer and the stock kernel runs on that
with a block table renumbered to it. Widening is exact: BF16, FP16 and FP32 hold every e4m3 number.

Scales: a cache holds k / k_scale and v / v_scale. Both are linear in the result, so they aren't multiplied into the scratch
cache (a second rounding) but into the softmax scale and the output.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # torch.finfo(FP8).max; beyond it the conversion gives NaN instead of saturating
CACHE_DTYPES = ("fp8", "fp8_e4m3")  # the engine's names for e4m3
ENCODER_TYPES = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class Fp8CPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN with an FP8 cache; any other cache dtype goes to the stock code unchanged."""

    @staticmethod
    def get_impl_cls() -> type[Fp8CPUAttentionImpl]:
        return Fp8CPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Fp8CPUAttentionMetadataBuilder]:
        return Fp8CPUAttentionMetadataBuilder


@dataclass
class Fp8CPUAttentionMetadata(CPUAttentionMetadata):
    """Adds, once per step for all layers: `used_blocks` [blocks in use], their ids in the cache, and `scratch_table`, the block
    table (same shape) in terms of positions in `used_blocks`."""

    used_blocks: torch.Tensor | None = None
    scratch_table: torch.Tensor | None = None


class Fp8CPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """The stock builder, kept from asking whether the stock kernel can read FP8."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.emulates_fp8 = vllm_config.cache_config.cache_dtype in CACHE_DTYPES
        shown = vllm_config
        if self.emulates_fp8:
            shown = copy.copy(vllm_config)
            shown.cache_config = copy.copy(vllm_config.cache_config)
            shown.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, shown, device)
        self.vllm_config = vllm_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self.emulates_fp8 or self.is_encoder_only_attention:
            return metadata
        used, table = renumber(metadata.block_table, metadata.seq_lens, self.block_size)
        stock = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
        return Fp8CPUAttentionMetadata(**stock, used_blocks=used, scratch_table=table)


class Fp8CPUAttentionImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        fp8 = kv_cache_dtype in CACHE_DTYPES
        shown = "auto" if fp8 else kv_cache_dtype
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, shown, *args, **kwargs
        )
        self.emulates_fp8 = fp8 and self.attn_type not in ENCODER_TYPES

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values ([tokens, KV heads, head size]) into their slots, rounded to FP8."""
        if not self.emulates_fp8:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        store(key, value, kv_cache, slot_mapping, layer.isa, **scales)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [tokens, heads, head size] -> `output`, same shape; kv_cache [blocks, KV heads, block size, 2 * head size]."""
        fused = output_scale is not None or output_block_scale is not None
        if not self.emulates_fp8 or attn_metadata is None or fused:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        tokens = attn_metadata.num_actual_tokens
        scratch = widen(kv_cache, attn_metadata.used_blocks, query.dtype)
        key_cache, value_cache = _halves(scratch)
        if self.sinks is not None and self.sinks.dtype not in (torch.bfloat16, torch.float32):
            self.sinks = self.sinks.float()  # the stock kernel's rule
        out = output[:tokens]
        ops.cpu_attention_with_kv_cache(
            query=query[:tokens],
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            scale=self.scale * layer._k_scale_float,
            causal=attn_metadata.causal,
            alibi_slopes=self.alibi_slopes,
            sliding_window=self.sliding_window,
            block_table=attn_metadata.scratch_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            s_aux=self.sinks,
            dynamic_causal=attn_metadata.dynamic_causal,
        )
        if layer._v_scale_float != 1.0:
            out.mul_(layer._v_scale_float)
        return output


def renumber(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids of the blocks that sequences use, each once; the table with each id replaced by its position among them).

    block_table [sequences, max blocks] of ids, seq_lens [sequences] in tokens. Entries past a sequence's end become 0.
    """
    blocks = (seq_lens + block_size - 1) // block_size
    in_use = torch.arange(block_table.shape[1]) < blocks[:, None]
    used, position = torch.unique(block_table[in_use], return_inverse=True)
    table = torch.zeros_like(block_table)
    table[in_use] = position.to(table.dtype)
    return used, table


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale as e4m3 bits (uint8, same shape): saturated at 448, rounded once to nearest even, NaN kept."""
    scaled = x.float() if scale == 1.0 else x.float() / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    *,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write tokens into the FP8 cache where the stock kernel for `isa` would put them.

    key and value [tokens, KV heads, head size], kv_cache [blocks, KV heads, block size, 2 * head size] of one-byte elements,
    slot_mapping [tokens] (block * block size + offset; negative: padding, skipped).
    """
    blocks, heads, block_size, fused = kv_cache.shape
    key_at, value_at = block_layout(isa, key.dtype, block_size, fused // 2)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    flat = kv_cache.view(torch.uint8).view(blocks, heads, -1)
    block = (slots // block_size)[:, None, None]
    offset = slots % block_size
    head = torch.arange(heads)[None, :, None]
    tokens = slot_mapping.shape[0]
    flat[block, head, key_at[offset][:, None, :]] = to_fp8(key[:tokens][keep], k_scale)
    flat[block, head, value_at[offset][:, None, :]] = to_fp8(value[:tokens][keep], v_scale)


@functools.lru_cache
def block_layout(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the stock kernel keeps a block's elements: for keys and for values, [block size, head size] of offsets into one
    head's share of the block (2 * block size * head size elements).

    The order is the kernel's own affair and differs between instruction sets, so it is asked: a block is written whose
    elements say which element they are, eight bits at a time, because BF16 counts exactly only to 256.
    """
    count = block_size * head_size
    element = torch.arange(count).view(block_size, 1, head_size)
    cache = torch.zeros(1, 1, block_size, 2 * head_size, dtype=dtype)
    keys, values = _halves(cache)
    found = torch.zeros(2, count, dtype=torch.long)
    for shift in range(0, max(count - 1, 1).bit_length(), 8):
        digit = ((element >> shift) & 0xFF).to(dtype)
        ops.cpu_attn_reshape_and_cache(digit, digit, keys, values, torch.arange(block_size), isa)
        found += cache.view(2, count).long() << shift
    if not torch.equal(found.sort(dim=1).values, torch.arange(count).expand(2, -1)):
        raise RuntimeError(
            f"the KV cache layout of the {isa} kernel isn't a permutation of a block's elements"
        )
    key_at, value_at = found.argsort(dim=1).view(2, block_size, head_size)
    return key_at, value_at + count


def widen(kv_cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The chosen blocks of an FP8 cache as `dtype`: [len(blocks), KV heads, block size, 2 * head size], valid until the next call.

    Two bytes at a time through a table: PyTorch's own conversion takes 4.2 to 4.5 ns an element on a CPU, this 0.4 (measured,
    2 cores). The result lives in a buffer that is kept, because fresh pages would cost more than the conversion.
    """
    picked = kv_cache.view(torch.uint8).index_select(0, blocks)
    table = _pair_table(dtype)
    out = _buffer(dtype, picked.numel())
    torch.index_select(table, 0, picked.view(torch.uint16).view(-1).int(), out=out.view(table.dtype))
    return out.view(picked.shape)


@functools.cache
def _pair_table(dtype: torch.dtype) -> torch.Tensor:
    """[65536] integers: entry i holds the two numbers of `dtype` that the e4m3 bits of the uint16 i stand for."""
    wide = torch.int32 if dtype.itemsize == 2 else torch.int64
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(FP8).to(dtype).view(wide)


_buffers: dict[torch.dtype, torch.Tensor] = {}


def _buffer(dtype: torch.dtype, count: int) -> torch.Tensor:
    if dtype not in _buffers or _buffers[dtype].numel() < count:
        _buffers[dtype] = torch.empty(count, dtype=dtype)
    return _buffers[dtype][:count]


def _halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) of a fused cache, each [blocks, KV heads, block size, head size], as the stock kernel slices it."""
    blocks, heads, block_size, _ = cache.shape
    keys, values = cache.view(blocks, heads, 2 * block_size, -1).chunk(2, dim=2)
    return keys, values
