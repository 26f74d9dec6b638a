"""The KV pool in whole blocks, as vLLM 0.32 lays it out (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py).

One pool of equal blocks serves all layers. Layers of one kind share block tables ("groups"); a model with several kinds (full
and sliding attention, attention and recurrent state) gets several groups of as many layers, so that a block is one page of
every layer of any one group. A sequence takes blocks from each group: all its tokens where attention is full, a window plus
what is in flight where it slides, one where the state has a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import NONE_SKIPPED, TURBOQUANT_BITS, is_boundary, kappa_bytes, layer_token_bytes
from pipeline.capacity.layers import Attention, Recurrent
from pipeline.errors import UserInputError

# A group size follows the largest kind where that is less than so many times the smallest (v1/core/kv_cache_utils.py).
PADDING_LIMIT = 1.5


@dataclass(frozen=True)
class EngineRules:
    """The engine's choices that decide how blocks are counted."""

    block_size: int = 16
    """Tokens per block, as asked for."""
    kernel_block: int = 16
    """Smallest block of the attention kernels: 16 on CUDA, 32 on a CPU."""
    max_num_batched_tokens: int = 2048
    concurrent_batches: int = 2
    """Scheduler steps in flight: 2 with asynchronous scheduling (CUDA's default), 1 on a CPU."""
    state_element_bytes: int = 2
    """Of recurrent states: the model's own dtype, FP32 on a CPU with AVX512-BF16 (platforms/cpu.py)."""
    prefix_caching: bool = False
    """With it a recurrent layer holds two states per sequence instead of one."""
    tokens_by_blocks: bool = False
    """Before 0.26 the log counted blocks x block size over the groups, since then concurrency x max_model_len."""
    hybrid_manager: bool = True
    """Without it sliding layers keep all tokens (--disable-hybrid-kv-cache-manager)."""

    def __post_init__(self) -> None:
        for name in ("block_size", "kernel_block", "max_num_batched_tokens", "concurrent_batches"):
            if getattr(self, name) <= 0:
                raise UserInputError(f"{name} is {getattr(self, name)}, it must be positive")

    @property
    def in_flight_tokens(self) -> int:
        return self.concurrent_batches * self.max_num_batched_tokens


@dataclass(frozen=True)
class Group:
    """Layers that share a block table. `window` None: full attention; `states`: blocks of a fixed-size state, else 0."""

    layers: tuple[int, ...]
    block_size: int
    window: int | None = None
    states: int = 0

    def blocks(self, tokens: int, in_flight_tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens takes, at most."""
        if self.states:
            return self.states
        if self.window is None:
            return math.ceil(tokens / self.block_size)
        # One more than the window's tokens fill, since it needn't start at a block's beginning.
        return math.ceil(min(self.window - 1 + in_flight_tokens, tokens) / self.block_size) + 1


@dataclass(frozen=True)
class KvPool:
    """A pool of `blocks` blocks, read at `max_model_len` tokens per sequence."""

    blocks: int
    block_size: int
    blocks_per_sequence: int
    max_model_len: int
    groups: int = 1
    tokens_by_blocks: bool = False

    @property
    def logged_sequences(self) -> float:
        """ "Maximum concurrency" of the engine's log: the null block is not deducted."""
        return self.blocks / self.blocks_per_sequence

    @property
    def tokens(self) -> int:
        """ "KV cache size" of the engine's log, in the engine's own floating-point steps."""
        if self.tokens_by_blocks:
            return self.blocks // self.groups * self.block_size
        return int(self.logged_sequences * self.max_model_len)

    @property
    def fitting_sequences(self) -> int:
        """Whole sequences that really fit: one block is the engine's null block (v1/core/block_pool.py)."""
        return max(0, self.blocks - 1) // self.blocks_per_sequence

    @property
    def waste_tokens(self) -> int:
        """Tokens of room that a sequence of `max_model_len` leaves unused in its last block, one group's worth."""
        return -self.max_model_len % self.block_size


@dataclass(frozen=True)
class Layout:
    """How one model's cache is cut into blocks on `ranks` ranks."""

    groups: tuple[Group, ...]
    block_bytes: tuple[int, ...]
    """Per pipeline rank: bytes of one block over the rank's layers."""
    kappa_bytes: int
    rules: EngineRules

    @property
    def block_size(self) -> int:
        """Tokens per block of the layers that keep all tokens (of the windowed ones where none does)."""
        sizes = [group.block_size for group in self.groups if not group.states]
        return sizes[0] if sizes else self.rules.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens takes over all groups."""
        return sum(group.blocks(tokens, self.rules.in_flight_tokens) for group in self.groups)

    def pool(self, budget_bytes: int | Sequence[int], max_model_len: int) -> KvPool:
        """The pool that a budget holds, in bytes: one for all ranks, or one per pipeline rank. The smallest decides."""
        if max_model_len <= 0:
            raise UserInputError(f"max_model_len is {max_model_len}, it must be positive")
        budgets = [budget_bytes] * len(self.block_bytes) if isinstance(budget_bytes, int) else budget_bytes
        blocks = min(max(0, budget) // size for budget, size in zip(budgets, self.block_bytes, strict=True))
        return KvPool(
            blocks, self.block_size, self.blocks_for(max_model_len), max_model_len,
            len(self.groups), self.rules.tokens_by_blocks,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def kv_layout(
    geometry: Geometry,
    dtype: str,
    rules: EngineRules | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    skipped: frozenset[int] = NONE_SKIPPED,
) -> Layout:
    """Groups and block bytes of `geometry` with a `dtype` cache; `UserInputError` where the ranks don't divide the heads.

    `skipped`: layers whose cache stays at 16 bits.
    """
    rules = rules or EngineRules()
    _check_ranks(geometry, tensor_parallel, pipeline_parallel)
    rules, state_page = _aligned(geometry, dtype, rules, tensor_parallel, skipped)
    groups = _groups(geometry, rules)
    ranks = pipeline_ranks(len(geometry.layers), pipeline_parallel)

    def page(layer: int) -> int:
        if isinstance(geometry.layers[layer].mixer, Recurrent):
            return state_page
        return rules.block_size * layer_token_bytes(geometry, layer, dtype, tensor_parallel, skipped)

    block_bytes = tuple(
        max(sum(page(layer) for layer in group.layers if layer in rank) for group in groups) for rank in ranks
    )
    return Layout(groups, block_bytes, kappa_bytes(geometry, dtype, tensor_parallel, skipped), rules)


def pipeline_ranks(layers: int, ranks: int) -> list[range]:
    """Layers of each pipeline rank: what doesn't divide goes to the ranks before the last (vLLM distributed/utils.py)."""
    counts = [layers // ranks] * ranks
    for index in range(2, layers % ranks + 2):
        counts[-index] += 1
    starts = [sum(counts[:rank]) for rank in range(ranks)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _check_ranks(geometry: Geometry, tensor_parallel: int, pipeline_parallel: int) -> None:
    for name, value in (("tensor_parallel", tensor_parallel), ("pipeline_parallel", pipeline_parallel)):
        if value < 1:
            raise UserInputError(f"{name} is {value}, it must be at least 1")
    if pipeline_parallel > len(geometry.layers):
        raise UserInputError(
            f"pipeline_parallel is {pipeline_parallel}, but there are only {len(geometry.layers)} layers"
        )
    for layer in geometry.layers:
        counts = {
            "heads": getattr(layer.mixer, "heads", None),
            "state heads": getattr(layer.mixer, "state_heads", None),
        }
        for name, count in counts.items():
            if count is not None and count % tensor_parallel:
                raise UserInputError(
                    f"tensor_parallel {tensor_parallel} doesn't divide the model's {count} {name}"
                )
        if isinstance(layer.mixer, Attention):
            kv_heads = layer.mixer.kv_heads
            if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
                raise UserInputError(
                    f"tensor_parallel {tensor_parallel} neither divides the model's {kv_heads} KV heads nor is a multiple of them"
                )


def _aligned(
    geometry: Geometry, dtype: str, rules: EngineRules, tensor_parallel: int, skipped: frozenset[int]
) -> tuple[EngineRules, int]:
    """The block size that the engine ends up with, and the bytes of a recurrent layer's page (0 where there is none).

    Pages must be equal: beside a large recurrent state the attention block grows until its page covers the state, and beside
    layers that keep 16 bits (TurboQuant's outer ones, skipped ones) a smaller dtype's block until its page covers theirs (platforms/interface.py, _align_hybrid_block_size and
    _align_heterogeneous_kv_block_size).
    """
    states = [
        layer.mixer.state_bytes(tensor_parallel, 2, rules.state_element_bytes)
        for layer in geometry.layers
        if isinstance(layer.mixer, Recurrent)
    ]
    attention = [
        index for index, layer in enumerate(geometry.layers) if not isinstance(layer.mixer, Recurrent)
    ]
    if not attention:
        raise UserInputError(f"{geometry.architecture} has no attention layer; such models aren't modelled")
    unit = max(rules.kernel_block, rules.block_size)
    if states:
        per_token = layer_token_bytes(geometry, attention[0], dtype, tensor_parallel)
        block_size = max(rules.block_size, unit * math.ceil(max(states) / (unit * per_token)))
        return replace(rules, block_size=block_size), block_size * per_token
    if skipped or (dtype in TURBOQUANT_BITS and any(is_boundary(geometry, i, dtype) for i in attention)):
        if any(getattr(geometry.layers[index].mixer, "window", None) for index in attention):
            raise UserInputError(
                f"kv_cache_dtype {dtype} beside 16-bit layers isn't modelled where layers slide a window"
            )
        sizes = [layer_token_bytes(geometry, index, dtype, tensor_parallel, skipped) for index in attention]
        needed = unit * math.ceil(max(sizes) * rules.kernel_block / (unit * min(sizes)))
        return replace(rules, block_size=max(rules.block_size, needed)), 0
    return rules, 0


def _groups(geometry: Geometry, rules: EngineRules) -> tuple[Group, ...]:
    """Layers by kind, cut into groups of as equal a number of layers as the engine makes them."""
    kinds: dict[tuple[int | None, int], list[int]] = {}
    windows = {
        getattr(layer.mixer, "window", None)
        for layer in geometry.layers
        if isinstance(layer.mixer, Attention)
    }
    keep_all = not rules.hybrid_manager and None in windows
    for index, layer in enumerate(geometry.layers):
        if isinstance(layer.mixer, Recurrent):
            kind: tuple[int | None, int] = (None, 2 if rules.prefix_caching else 1)
        else:
            window = getattr(layer.mixer, "window", None)
            kind = (None if keep_all else window, 0)
        kinds.setdefault(kind, []).append(index)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < PADDING_LIMIT * min(counts) else min(counts)
    groups = []
    for (window, states), layers in kinds.items():
        number = math.ceil(len(layers) / size)
        groups += [
            Group(tuple(layers[start::number]), rules.block_size, window, states) for start in range(number)
        ]
    return tuple(groups)
