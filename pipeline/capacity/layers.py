"""What a decoder layer is made of, as far as memory is concerned: one mixer and one feed-forward part.

A mixer decides what a layer keeps per token (or, for recurrent ones, per sequence); both decide its weights. Linear modules are
(out_features, in_features), under the names that Hugging Face checkpoints give them (transformers 5, models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, int]


@dataclass(frozen=True)
class Linear:
    """One linear module. `quantized`: AWQ, GPTQ, FP8 and W8A8 recipes store it in low precision; routers, for one, stay at 16 bits."""

    name: str
    shape: Shape
    bias: bool = False
    quantized: bool = True
    copied_beyond: int | None = None
    """Tensor-parallel ranks beyond this many hold copies: of KV heads, of a router. None: split over any number."""


@dataclass(frozen=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention; `window` None: over the whole context."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    bias: bool = False
    """On q, k and v."""
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    """One learned logit per head (gpt-oss)."""
    gated: bool = False
    """The query projection also yields an output gate of its own size (Qwen3-Next)."""

    def linears(self, hidden: int) -> Iterator[Linear]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Linear("self_attn.q_proj", (queries * (2 if self.gated else 1), hidden), self.bias)
        yield Linear("self_attn.k_proj", (keys, hidden), self.bias, copied_beyond=self.kv_heads)
        yield Linear("self_attn.v_proj", (keys, hidden), self.bias, copied_beyond=self.kv_heads)
        yield Linear("self_attn.o_proj", (hidden, queries), self.output_bias)

    @property
    def other_elements(self) -> int:
        return (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): one latent vector and one rotary key per token, for all heads."""

    heads: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None

    @property
    def latent_dim(self) -> int:
        """Elements kept per token and layer, whatever the number of heads."""
        return self.kv_rank + self.rope_dim

    def linears(self, hidden: int) -> Iterator[Linear]:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_rank is None:
            yield Linear("self_attn.q_proj", (queries, hidden))
        else:
            yield Linear("self_attn.q_a_proj", (self.query_rank, hidden), copied_beyond=1)
            yield Linear("self_attn.q_b_proj", (queries, self.query_rank))
        yield Linear("self_attn.kv_a_proj_with_mqa", (self.latent_dim, hidden), copied_beyond=1)
        yield Linear("self_attn.kv_b_proj", (self.heads * (self.nope_dim + self.value_dim), self.kv_rank))
        yield Linear("self_attn.o_proj", (hidden, self.heads * self.value_dim))

    @property
    def other_elements(self) -> int:
        return self.kv_rank + (self.query_rank or 0)


@dataclass(frozen=True)
class Recurrent:
    """A mixer with a state of fixed size per sequence: Mamba-2 or a gated delta network.

    The state is a short convolution's last inputs (`conv_channels` x (`conv_kernel` - 1)) and `state_heads` matrices of
    `state_per_head` elements (vLLM 0.32 model_executor/layers/mamba/mamba_utils.py).
    """

    modules: tuple[tuple[str, Shape], ...]
    conv_channels: int
    conv_kernel: int
    state_heads: int
    state_per_head: int
    plain_elements: int
    """Biases, decays and norms of the mixer."""
    groups: int | None = None
    """Mamba-2's n_groups, with `group_channels` convolution channels each: grown to a multiple of the ranks."""
    group_channels: int = 0

    def linears(self, hidden: int) -> Iterator[Linear]:
        for name, shape in self.modules:
            yield Linear(name, shape)

    @property
    def other_elements(self) -> int:
        return self.conv_channels * self.conv_kernel + self.plain_elements

    def state_bytes(self, tensor_parallel: int, conv_element_bytes: int, state_element_bytes: int) -> int:
        """Bytes per sequence, layer and rank."""
        channels = self.conv_channels
        if self.groups is not None and self.groups % tensor_parallel:
            channels += (tensor_parallel - self.groups) * self.group_channels
        convolution = channels // tensor_parallel * (self.conv_kernel - 1) * conv_element_bytes
        heads = self.state_heads // tensor_parallel
        return convolution + heads * self.state_per_head * state_element_bytes


@dataclass(frozen=True)
class FeedForward:
    """A gated MLP, or `experts` of them behind a router, with an optional shared one."""

    intermediate: int
    bias: bool = False
    experts: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    taken: int = 0
    """Experts that one token goes through, in kernels that keep every token's copies at hand between the two products; 0: dense, or
    kernels that don't."""

    def linears(self, hidden: int) -> Iterator[Linear]:
        if not self.experts:
            yield from _gated_mlp("mlp", self.intermediate, hidden, self.bias)
            return
        yield Linear("mlp.gate", (self.experts, hidden), self.router_bias, quantized=False, copied_beyond=1)
        for expert in range(self.experts):
            yield from _gated_mlp(f"mlp.experts.{expert}", self.intermediate, hidden, self.bias)
        if self.shared_intermediate:
            yield from _gated_mlp("mlp.shared_expert", self.shared_intermediate, hidden, False)
        if self.shared_gate:
            yield Linear("mlp.shared_expert_gate", (1, hidden), quantized=False, copied_beyond=1)


def _gated_mlp(prefix: str, intermediate: int, hidden: int, bias: bool) -> Iterator[Linear]:
    yield Linear(f"{prefix}.gate_proj", (intermediate, hidden), bias)
    yield Linear(f"{prefix}.up_proj", (intermediate, hidden), bias)
    yield Linear(f"{prefix}.down_proj", (hidden, intermediate), bias)


Mixer = Attention | LatentAttention | Recurrent


@dataclass(frozen=True)
class Layer:
    """One decoder layer: mixer, feed-forward part (None: it has none) and the elements of its own norms."""

    mixer: Mixer
    feed_forward: FeedForward | None
    norm_elements: int

    def linears(self, hidden: int) -> Iterator[Linear]:
        yield from self.mixer.linears(hidden)
        if self.feed_forward is not None:
            yield from self.feed_forward.linears(hidden)
