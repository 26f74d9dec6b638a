"""What the engine holds on a card beside weights and KV pool: each term computed from what drives it, with a band.

Sizes of tensors are read from vLLM's source, so they are the same on every card; what kernels, allocator and driver add is a
constant of the card with a band and a source (conf/overheads/). Read: 0.32's v1/worker/gpu/ ("V2", its default model runner) and
v1/worker/gpu_model_runner.py ("V1"), the default before. Checked against 46 start-ups on H100 cards with V1, and some on 24 GB cards
(tests/unit/capacity/public_overheads.yaml; README of that test: test_public_overheads.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.capacity.budget import GIB, Term
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import Attention, FeedForward, LatentAttention, Mixer

MIB = 1024**2
GRAPHS_COUNTED_FROM = (0, 20)
"""Since then the engine takes its graphs' estimate off the pool (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)."""
LARGEST_CAPTURE = 512
"""Tokens; 1,024 on data-centre Blackwell, compute capability 10.x (config/vllm.py, _set_cudagraph_sizes)."""
HIDDEN_COPIES = 4
"""Of a step's hidden states at the peak of a dense layer: residual, normed input, and the ones around them. Fitted: with the three
of the MLP's width it gives 0.75 of 0.77 GiB logged for CodeLlama-7b, and 1.06 of 1.10 and 1.05 for the first of 2 and 4 pipeline ranks."""
LOGIT_COPIES_V1 = 3
"""FP32 copies of the logits beside those of the model's dtype while V1 samples (v1/sample/sampler.py, topk_topp_sampler.py)."""
TRITON_TOP_K_FROM = (0, 17)
"""Before, V1 sorted: values, indices and masks of 9 more FP32 copies in all (5.64 GiB logged by 0.16, 2.23 by 0.17, same model)."""
SORTED_COPIES_V1 = 9
FLASHINFER_WORKSPACE_BYTES = 394 * MIB
"""VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, at least (envs.py)."""
FLASHINFER_INVARIANT_BYTES = 2048 * MIB
"""The same with VLLM_BATCH_INVARIANT=1 (v1/attention/backends/flashinfer.py, _get_workspace_buffer)."""
FLASHINFER_PREFILL_BYTES = 16
"""Per batched token, query head and channel: what the workspace grows to (the same)."""
FLASHINFER_WRAPPER_BYTES = 8 * MIB
"""FlashInfer's integer workspace of each wrapper; one wrapper per captured decode batch (flashinfer/decode.py)."""
FA3_SPLITS = 32
"""flash_attn_max_num_splits_for_cuda_graph: FP32 partial results of a captured decode step in FlashAttention 3 (config/attention.py)."""

CONSTANTS = (
    "buffers_gib",
    "workspace_gib",
    "non_torch_gib",
    "parallel_gib",
    "graph_layer_mib",
    "graph_expert_layer_mib",
    "context_gib",
    "parallel_context_gib",
)


@dataclass(frozen=True)
class Constant:
    """What no source code gives: a card's figure with its band, in the unit that its name ends in."""

    value: float
    low: float
    high: float
    source: str = ""
    runs: int = 0


@dataclass(frozen=True)
class Constants:
    """A card's. `values` has every name of `CONSTANTS`."""

    values: Mapping[str, Constant]
    multiprocessors: int

    def __getitem__(self, name: str) -> Constant:
        return self.values[name]


@dataclass(frozen=True)
class Drivers:
    """What moves the terms. `version` as (0, 32); `backend`: of attention, as vLLM names it."""

    version: tuple[int, int]
    max_num_batched_tokens: int
    max_num_seqs: int
    eager: bool = False
    v2: bool = True
    backend: str = "FLASH_ATTN"
    capability: int | None = None
    """89 for 8.9; None: not known."""
    tensor_parallel: int = 1
    element_bytes: int = 2
    narrow_inputs: bool = False
    """Whether linear layers take their inputs in 8 bits (FP8 and INT8 W8A8 weights)."""
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        """Sequences of the profile run, one row of logits each."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that are captured (config/vllm.py, _set_cudagraph_sizes, without speculation)."""
        if self.eager:
            return ()
        ceiling = 2 * LARGEST_CAPTURE if (self.capability or 0) // 10 == 10 else LARGEST_CAPTURE
        tokens = self.max_num_batched_tokens
        most = min(2 * self.max_num_seqs, ceiling)
        decode = {self.max_num_seqs} if self.max_num_seqs <= most else set()
        most = min(tokens, most)
        sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), tokens}
        return tuple(sorted({size for size in sizes if size <= most} | {n for n in decode if n <= tokens}))

    @property
    def decode_captures(self) -> int:
        """Of these the batches of one token per sequence, captured whole beside the piecewise ones (FULL_AND_PIECEWISE)."""
        return sum(size <= self.max_num_seqs for size in self.capture_sizes)

    @property
    def fa3(self) -> bool:
        return self.backend == "FLASH_ATTN" and (self.capability or 0) // 10 == 9


def overhead_terms(geometry: Geometry, drivers: Drivers, constants: Constants) -> tuple[Term, ...]:
    """The terms of the budget on one rank; of several pipeline ranks the last, which samples.

    Named as the engine's log names them, but for `buffers` (in its loaded weights), `sampler` and `experts` (in its consumed memory).
    """
    terms = [
        _buffers(geometry, drivers, constants["buffers_gib"]),
        _activation(geometry, drivers, constants),
        _non_torch(drivers, constants),
    ]
    if drivers.v2:
        terms.append(_sampler(geometry, drivers))
    if any(one.taken for one in feed_forwards(geometry)):
        terms.append(_experts(geometry, drivers))
    if drivers.version >= GRAPHS_COUNTED_FROM:
        terms.append(cuda_graphs(geometry, drivers, constants))
    return tuple(terms)


def context_term(drivers: Drivers, constants: Constants) -> Term:
    """CUDA's context, and NCCL's buffers where there are several ranks: taken before the engine looks how much is free
    (v1/worker/gpu_worker.py, init_device), so outside its share and out of what others may hold."""
    own, more = constants["context_gib"], constants["parallel_context_gib"]
    several = drivers.tensor_parallel > 1
    parts = [own, more] if several else [own]
    what = f"CUDA's, NCCL's of {drivers.tensor_parallel} ranks" if several else "CUDA's"
    return _sum_gib("context", parts, what)


def workspace_bytes(geometry: Geometry, drivers: Drivers) -> int:
    """FlashInfer's, allocated after the profile run and in no measurement (v1/attention/backends/flashinfer.py): outside the engine's share."""
    if drivers.backend != "FLASHINFER":
        return 0
    if drivers.batch_invariant:
        return FLASHINFER_INVARIANT_BYTES
    width = max(heads * head_dim for heads, head_dim in _attention(geometry)) // drivers.tensor_parallel
    return max(FLASHINFER_WORKSPACE_BYTES, FLASHINFER_PREFILL_BYTES * drivers.max_num_batched_tokens * width)


def feed_forwards(geometry: Geometry) -> list[FeedForward]:
    """The kinds that the layers have."""
    return list(dict.fromkeys(layer.feed_forward for layer in geometry.layers if layer.feed_forward))


def _buffers(geometry: Geometry, drivers: Drivers, more: Constant) -> Term:
    """What loading adds to the checkpoint: the rotary table, latent attention's absorbed projections, the allocator's rounding."""
    mixers = [layer.mixer for layer in geometry.layers]
    rotary = max((_rotary_width(mixer) for mixer in mixers), default=0)
    tables = geometry.max_position * rotary * drivers.element_bytes
    absorbed = sum(
        mixer.heads * (mixer.nope_dim + mixer.value_dim) * mixer.kv_rank * drivers.element_bytes
        for mixer in mixers
        if isinstance(mixer, LatentAttention)
    )
    return _around(
        "buffers",
        tables + absorbed // drivers.tensor_parallel,
        more,
        f"rotary table of {geometry.max_position:,} positions, rounding of {len(mixers)} layers",
    )


def _rotary_width(mixer: Mixer) -> int:
    if isinstance(mixer, LatentAttention):
        return mixer.rope_dim
    return mixer.head_dim if isinstance(mixer, Attention) else 0


def _activation(geometry: Geometry, drivers: Drivers, constants: Constants) -> Term:
    """The profile run's peak: a dense layer over all batched tokens, or sampling from all sequences' logits.

    A step of T tokens holds 3 values of the MLP's width (gate, up, product) and `HIDDEN_COPIES` of the hidden one each. Sampling
    comes after it, beside the T hidden states: V2's dummy batch asks for no processing, so logits stay as the model made them
    (v1/worker/gpu/sample/sampler.py, apply_sampling_params); they are gathered, so tensor parallelism leaves them whole.
    """
    tokens, rows, size = drivers.max_num_batched_tokens, drivers.rows, drivers.element_bytes
    step = tokens * size * (_dense_width(geometry, drivers) + HIDDEN_COPIES * geometry.hidden)
    logits = rows * geometry.vocabulary
    images = _images(geometry, tokens) * size
    step += images
    sampling = tokens * size * geometry.hidden + size * logits + images
    copied = 4 * logits
    if not drivers.v2:
        copies = LOGIT_COPIES_V1
        copies += 0 if drivers.version >= TRITON_TOP_K_FROM else SORTED_COPIES_V1 - LOGIT_COPIES_V1
        sampling += copies * copied
        if drivers.version >= TRITON_TOP_K_FROM:
            sampling += (
                4 * constants.multiprocessors * geometry.vocabulary
            )  # the top-k kernel's, one row each
    what = f"logits of {rows:,} sequences" if sampling > step else f"a step of {tokens:,} tokens"
    if drivers.tensor_parallel > 1 and step >= sampling:
        what += f" on one of {drivers.tensor_parallel} ranks"
    term = _around("activation", max(step, sampling), constants["workspace_gib"], what)
    if not drivers.v2:
        return term
    # A profile run whose batch did ask for processing would hold one FP32 copy more.
    high = max(term.high_bytes, _around("", sampling + copied, constants["workspace_gib"], "").high_bytes)
    return replace(term, high_bytes=high)


def _images(geometry: Geometry, tokens: int) -> int:
    """Values that a profile run of a multimodal model holds until its end: as many images as the step's tokens allow, and their
    embeddings (v1/worker/gpu/mm/, profile_encoder_cache; V1's profile_run alike)."""
    if geometry.images is None:
        return 0
    return tokens // geometry.images.tokens * geometry.images.values + tokens * geometry.hidden


def _dense_width(geometry: Geometry, drivers: Drivers) -> int:
    """Values per token of the widest dense MLP on one rank; its 8-bit copies of the inputs count half."""
    widest = max((_dense(one) for one in feed_forwards(geometry)), default=0) // drivers.tensor_parallel
    inputs = max(widest, geometry.hidden) // drivers.element_bytes if drivers.narrow_inputs else 0
    return 3 * widest + inputs


def _dense(one: FeedForward) -> int:
    return one.shared_intermediate if one.experts else one.intermediate


def _sampler(geometry: Geometry, drivers: Drivers) -> Term:
    """V2 keeps what each sequence has said, a count per token, and a bit per token for its prompt
    (v1/worker/gpu/sample/penalties.py: output_bin_counts, prompt_bin_mask); made after loading, before the profile run."""
    rows = drivers.max_num_seqs
    size = 4 * rows * (geometry.vocabulary + math.ceil(geometry.vocabulary / 32))
    what = f"{rows:,} sequences x {geometry.vocabulary:,} tokens"
    return Term("sampler", size, size, size, what, "vLLM 0.32, v1/worker/gpu/sample/penalties.py")


def _experts(geometry: Geometry, drivers: Drivers) -> Term:
    """Two workspaces of the expert kernels, kept once grown (model_executor/layers/fused_moe/modular_kernel.py): every token's
    copies before and after the first product share one, those after the second have the other."""
    width, ranks = geometry.hidden, drivers.tensor_parallel
    size = max(
        one.taken
        * (max(2 * one.intermediate // ranks, width) + max(one.intermediate // ranks, width))
        * drivers.element_bytes
        * drivers.max_num_batched_tokens
        for one in feed_forwards(geometry)
    )
    taken = max(one.taken for one in feed_forwards(geometry))
    what = f"{drivers.max_num_batched_tokens:,} tokens x {taken} experts"
    return Term(
        "experts", size, size, size, what, "vLLM 0.32, model_executor/layers/fused_moe/modular_kernel.py"
    )


def _non_torch(drivers: Drivers, constants: Constants) -> Term:
    """Kernels' code, cuBLAS, and with several ranks NCCL's and the all-reduce's buffers: outside PyTorch, after the context."""
    several = drivers.tensor_parallel > 1
    parts = [constants["non_torch_gib"], *([constants["parallel_gib"]] if several else [])]
    what = f"kernels, and buffers of {drivers.tensor_parallel} ranks" if several else "kernels"
    return _sum_gib("non_torch", parts, what)


def cuda_graphs(geometry: Geometry, drivers: Drivers, constants: Constants) -> Term:
    """Graphs: so much of each layer of each, the largest one's activations, and what attention keeps for them.

    Counted whatever the version; `overhead_terms` knows which ones take them off the pool.
    """
    sizes, decode = drivers.capture_sizes, drivers.decode_captures
    if not sizes:
        return Term("cuda_graphs", 0, 0, 0, "none in eager mode", "vLLM 0.32, v1/worker/gpu_worker.py")
    layers, ranks = len(geometry.layers), drivers.tensor_parallel
    width = 3 * max((_dense(one) for one in feed_forwards(geometry)), default=0) // ranks
    held = sizes[-1] * drivers.element_bytes * (width + HIDDEN_COPIES * geometry.hidden)
    what = f"{len(sizes)} piecewise and {decode} whole graphs"
    if drivers.backend == "FLASHINFER":
        held += decode * FLASHINFER_WRAPPER_BYTES
        what += f", {decode} FlashInfer wrappers"
    if drivers.fa3:
        most = max(size for size in sizes if size <= drivers.max_num_seqs)
        held += (
            FA3_SPLITS * most * 4 * max(heads * head_dim for heads, head_dim in _attention(geometry)) // ranks
        )
        what += f", {FA3_SPLITS} splits"
    experts = any(one.experts for one in feed_forwards(geometry))
    each = constants["graph_expert_layer_mib" if experts else "graph_layer_mib"]
    count = (len(sizes) + decode) * layers
    value, low, high = (held + int(figure * MIB * count) for figure in (each.value, each.low, each.high))
    return Term("cuda_graphs", value, low, high, what, each.source, each.runs)


def _attention(geometry: Geometry) -> list[tuple[int, int]]:
    """(query heads, channels) of the attention layers."""
    found = []
    for mixer in dict.fromkeys(layer.mixer for layer in geometry.layers):
        if isinstance(mixer, Attention):
            found.append((mixer.heads, mixer.head_dim))
        elif isinstance(mixer, LatentAttention):
            found.append((mixer.heads, mixer.kv_rank))
    return found


def _around(name: str, size: int, more: Constant, driver: str) -> Term:
    """A computed size and a constant on top of it, whose band is the term's."""
    value, low, high = (size + int(figure * GIB) for figure in (more.value, more.low, more.high))
    return Term(name, value, low, high, driver, more.source, more.runs)


def _sum_gib(name: str, parts: list[Constant], driver: str) -> Term:
    value, low, high = (
        int(sum(figures) * GIB)
        for figures in zip(*((part.value, part.low, part.high) for part in parts), strict=True)
    )
    sources = "; ".join(dict.fromkeys(part.source for part in parts))
    return Term(name, value, low, high, driver, sources, min(part.runs for part in parts))
