"""What a card's engine holds beside weights and KV cache, term by term, from what drives each term.

Pure. Every constant carries its source; those that were fitted are from public start-up logs of one H100 (vLLM 0.19, 8,192 batched
tokens, 1,024 sequences: [H100], tests/unit/capacity/public_overheads.yaml), checked on an RTX 4090 (0.24, 2,048 tokens, 256
sequences: 0.82 GiB of activations and memory outside PyTorch logged, 0.83 computed) and an RTX 3090 (0.6.6, 8,192 tokens: 1.09
logged, 1.09 computed). "V2" is vLLM's newer model runner, the default in 0.32 (v1/worker/gpu/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.capacity.budget import GIB, Term
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import FeedForward

MIB = 1024**2
V2_FROM = (0, 32)
GRAPHS_COUNTED_FROM = (0, 20)
"""Before, the engine didn't take its graphs off the budget (FACTS of vLLM 0.19: the pool is u*V less the other terms)."""
LOGIT_BYTES, LOGIT_BYTES_V2 = 14, 6
"""Of each of max_num_seqs x vocabulary logits at the profile run's peak. 14: fitted, [H100], vocabularies of 32,000 to 256,000. V2
holds them once in 16 and once in 32 bits (v1/worker/gpu/sample/sampler.py, `sample`); more is in its band."""
ROW_COPIES, ROW_FIXED = 1.6, int(0.06 * GIB)
"""What lives beside the logits: of one 16-bit row of hidden states per batched token so many, and a fixed part. Fitted, [H100]."""
MLP_ROWS, HIDDEN_ROWS = 3, 4
"""Of the widest layer's own peak, in 16-bit values per batched token: gate, up and their product, and the hidden states around."""
EXPERT_TOTAL = 4
"""Experts that a token takes are together about so many hidden widths wide (Mixtral 2 of 8, Qwen3-30B 8 of 128, gpt-oss 4 of 32); a
config's own number isn't part of the geometry."""
ACTIVATION_BAND = int(0.10 * GIB)
EXPERTS_MORE, EXPERTS_BAND = int(0.2 * GIB), int(0.4 * GIB)
"""[H100]: 20 dense runs lie within 0.10 GiB, but for one (a multimodal one in W8A8, 0.25); five with experts within 0.4 of 0.2 more."""
OUTSIDE = {1: (0.25, 0.20, 0.47), 2: (2.1, 0.5, 2.25)}
"""GiB outside PyTorch on one card, and on each of several (NCCL's buffers): [H100] 0.24 to 0.27, Granite 0.46; 2.06 to 2.21 with
NVLink. The low end on several is of vLLM 0.11 (llm-d-planner, docs/empirical-vllm-memory-results.md: 0.54)."""
GRAPH_LAYER_MIB = (0.23, 0.17, 0.31)
"""A captured graph takes so much of each layer. [H100], 0.18 to 0.31 in 20 of 27; 0.19 on the RTX 4090."""
EXPERT_GRAPH_LAYER_MIB = (0.35, 0.20, 0.62)
DECODE_WRAPPER_BYTES = 8 * MIB
"""FlashInfer's own buffer of each captured decode batch (vLLM 0.32, v1/attention/backends/flashinfer.py)."""
BUFFERS_GIB = (0.07, 0.01, 0.15)
"""What loading adds to the checkpoint's bytes: 14.25 (H100) and 14.29 GiB (RTX 4090) logged for a checkpoint of 14.185; 5.20 for 5.188
(github.com/xming521/WeClone/issues/101)."""
WORKSPACE_BYTES = 394 * MIB
"""FlashInfer's, allocated after the profile run: outside the budget, inside the card (vLLM 0.32 envs.py,
VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)."""


@dataclass(frozen=True)
class Drivers:
    """What moves the overheads. Sizes in tokens and sequences; `version` as (0, 32)."""

    version: tuple[int, int]
    max_num_batched_tokens: int
    max_num_seqs: int
    eager: bool
    flashinfer: bool
    """Whether the attention backend is FlashInfer."""
    tensor_parallel: int = 1

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes that graphs are captured of (vLLM 0.32 config/vllm.py, _set_cudagraph_sizes; no speculation)."""
        if self.eager:
            return ()
        most = min(2 * self.max_num_seqs, 512, self.max_num_batched_tokens)
        sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)}
        return tuple(sorted(size for size in sizes | {self.max_num_batched_tokens} if size <= most))

    @property
    def decode_sizes(self) -> int:
        """Of these the ones that are captured once more, whole, for pure decoding."""
        return sum(size <= self.max_num_seqs for size in self.capture_sizes)


def overhead_terms(geometry: Geometry, drivers: Drivers) -> tuple[Term, ...]:
    """The terms of one rank, named as the engine's log names them; `sampler` stands in its "consumed memory"."""
    terms = [
        _gib("buffers", BUFFERS_GIB, "what loading adds to the checkpoint's bytes"),
        _activation(geometry, drivers),
        _gib(
            "non_torch",
            OUTSIDE[min(drivers.tensor_parallel, 2)],
            "the driver's and NCCL's" if drivers.tensor_parallel > 1 else "the driver's",
        ),
    ]
    if drivers.version >= V2_FROM:
        terms.append(_sampler(geometry, drivers))
    if drivers.version >= GRAPHS_COUNTED_FROM:
        terms.append(_graphs(geometry, drivers))
    return tuple(terms)


def _activation(geometry: Geometry, drivers: Drivers) -> Term:
    """The profile run's peak: its widest layer over all batched tokens, or the sampler over all sequences' logits."""
    tokens, logits = drivers.max_num_batched_tokens, drivers.max_num_seqs * geometry.vocabulary
    row = 2 * tokens * geometry.hidden
    beside = ROW_FIXED + int(ROW_COPIES * row)
    newer = drivers.version >= V2_FROM
    sampling = (LOGIT_BYTES_V2 if newer else LOGIT_BYTES) * logits + beside
    layer = 2 * tokens * max(_layer_width(geometry, one, drivers.tensor_parallel) for one in _mlps(geometry))
    value = max(sampling, layer)
    more, band = (
        (EXPERTS_MORE, EXPERTS_BAND) if any(one.experts for one in _mlps(geometry)) else (0, ACTIVATION_BAND)
    )
    high = max(value, LOGIT_BYTES * logits + beside if newer else 0)
    what = (
        f"{drivers.max_num_seqs:,} sequences' logits" if sampling > layer else f"a step of {tokens:,} tokens"
    )
    value += more
    return Term("activation", value, max(0, value - band), max(high, value) + band, what)


def _mlps(geometry: Geometry) -> list[FeedForward]:
    found = list(dict.fromkeys(layer.feed_forward for layer in geometry.layers if layer.feed_forward))
    return found or [FeedForward(geometry.hidden)]


def _layer_width(geometry: Geometry, mlp: FeedForward, ranks: int) -> int:
    """Values per token at the peak of a layer on one rank."""
    around = HIDDEN_ROWS * geometry.hidden
    if not mlp.experts:
        return MLP_ROWS * mlp.intermediate // ranks + around
    taken = min(mlp.experts, 8, math.ceil(EXPERT_TOTAL * geometry.hidden / mlp.intermediate))
    each = MLP_ROWS * mlp.intermediate // ranks + geometry.hidden
    return taken * each + MLP_ROWS * mlp.shared_intermediate // ranks + around


def _sampler(geometry: Geometry, drivers: Drivers) -> Term:
    """V2's counts of what each sequence has said, and which tokens its prompt has (v1/worker/gpu/sample/penalties.py), kept for good."""
    rows, words = drivers.max_num_seqs, math.ceil(geometry.vocabulary / 32)
    size = 4 * rows * (geometry.vocabulary + words)
    return Term("sampler", size, size, size, f"{rows:,} sequences x {geometry.vocabulary:,} tokens")


def _graphs(geometry: Geometry, drivers: Drivers) -> Term:
    """CUDA graphs as the engine estimates them: each captured size's layers piece by piece, the decode ones whole as well."""
    graphs = len(drivers.capture_sizes) + drivers.decode_sizes
    if not graphs:
        return Term("cuda_graphs", 0, 0, 0, "none in eager mode")
    experts = any(one.experts for one in _mlps(geometry))
    wrappers = DECODE_WRAPPER_BYTES * drivers.decode_sizes if drivers.flashinfer else 0
    value, low, high = (
        int(each * MIB * graphs * len(geometry.layers)) + wrappers
        for each in (EXPERT_GRAPH_LAYER_MIB if experts else GRAPH_LAYER_MIB)
    )
    also = f", FlashInfer's buffers of {drivers.decode_sizes}" if wrappers else ""
    return Term("cuda_graphs", value, low, high, f"{graphs} graphs{also}")


def _gib(name: str, figures: tuple[float, float, float], what: str) -> Term:
    value, low, high = (int(figure * GIB) for figure in figures)
    return Term(name, value, low, high, what)
