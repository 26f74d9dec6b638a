"""One attention layer of vLLM's CPU backend without an engine: builder, cache and steps, for any backend class.

Needs the serve environment. `Layer.step` does what the engine does in one step: write the new tokens' keys and values, then
attend; the same steps can be given to the stock backend and to ours, and to a float32 reference.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

BLOCK_SIZE = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention layer's geometry."""

    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64

    @property
    def softmax_scale(self) -> float:
        return self.head_size**-0.5


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Part of a step: `new` tokens of a sequence that has `past` tokens in the cache and owns `blocks`."""

    past: int
    new: int
    blocks: tuple[int, ...]

    def slots(self) -> list[int]:
        return [
            self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for at in range(self.past, self.past + self.new)
        ]


class Layer:
    """A backend's layer with its own cache of `blocks` blocks."""

    def __init__(
        self,
        monkeypatch: Any,
        backend: Any,
        shape: Shape,
        cache_dtype: str,
        *,
        blocks: int = 24,
        dtype: torch.dtype = torch.bfloat16,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        from vllm.v1.attention.backends import cpu_attn
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        one_byte = cache_dtype.startswith("fp8")
        config = fake_config(cache_dtype, dtype, shape)
        monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            dtype=torch.uint8 if one_byte else dtype,
        )
        self.builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
        if sliding_window is not None:
            self.builder.window_size = sliding_window
        self.impl = backend.get_impl_cls()(
            shape.heads,
            shape.head_size,
            shape.softmax_scale,
            shape.kv_heads,
            None,
            sliding_window,
            cache_dtype,
            softcap,
        )
        self.layer = SimpleNamespace(isa=self.builder.isa, _k_scale_float=k_scale, _v_scale_float=v_scale)
        self.cache = torch.zeros(
            blocks, shape.kv_heads, BLOCK_SIZE, 2 * shape.head_size, dtype=torch.uint8 if one_byte else dtype
        )

    def step(
        self, sequences: list[Sequence], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [tokens, heads, head size], key and value [tokens, KV heads, head size] of all sequences in order -> output."""
        slots = torch.tensor([slot for sequence in sequences for slot in sequence.slots()])
        metadata = self.builder.build(0, common_metadata(sequences, slots))
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)
        output = torch.zeros_like(query)
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, output)
        return output


def fake_config(cache_dtype: str, dtype: torch.dtype, shape: Shape) -> Any:
    """As much of a VllmConfig as the CPU backend reads."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=None,
        model_config=SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda _: shape.heads),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def common_metadata(sequences: list[Sequence], slots: torch.Tensor) -> Any:
    """What the model runner hands to a metadata builder."""
    width = (
        max(len(sequence.blocks) for sequence in sequences) + 2
    )  # the engine's table is wider than any sequence
    table = torch.full((len(sequences), width), 7, dtype=torch.int32)  # stale ids behind a sequence's end
    for row, sequence in enumerate(sequences):
        table[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + sequence.new)
    lengths = [sequence.past + sequence.new for sequence in sequences]
    return SimpleNamespace(
        num_reqs=len(sequences),
        num_actual_tokens=starts[-1],
        max_query_len=max(sequence.new for sequence in sequences),
        max_seq_len=max(lengths),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
    )


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, past: int
) -> torch.Tensor:
    """Causal attention of one sequence in float32: query [new, heads, d], keys and values [past + new, KV heads, d]."""
    group = query.shape[1] // keys.shape[1]
    k = keys.float().repeat_interleave(group, dim=1)
    v = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    position = torch.arange(query.shape[0])[:, None] + past
    scores = scores.masked_fill(torch.arange(k.shape[0])[None, :] > position, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
