"""What the engine compiles while it starts, per attention backend and KV dtype, and so what it needs of a compiler.

Read from vLLM 0.32.0, FlashInfer 0.7.0.post1 and Triton 3.7.1. FlashInfer's wheel holds sources only; Triton brings its own
compiler for the card, and wants a C compiler and Python.h for the small modules that launch what it compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.compatibility.attention import FP8, SIXTEEN_BIT

Need = Literal["flashinfer", "triton"]
PER_TOKEN_HEAD = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
SAMPLER_DEFAULT = "0"
"""FlashInfer's top-k/top-p sampler stays off unless the settings name the variable.

vLLM 0.32 has it on, and its warm-up asks it for tokens (v1/worker/gpu/warmup.py: SamplingParams.for_sampler_warmup), so even a
BF16 cache on FlashAttention would need FlashInfer's compiler. Nothing that is measured runs on it: a step with a greedy request
doesn't (v1/worker/gpu/sample/sampler.py: fused_sampler_eligible), and load, scoring and divergence are greedy. Off in every arm, so
that no two differ in it. Who deploys with sampling and vLLM's default gets the other sampler: name it under `environment:` in
conf/server/, and it is compiled, measured with and written down."""


@dataclass(frozen=True)
class CompilerRow:
    """One backend with a family of KV dtypes. `modules` are FlashInfer's, named as its cache folder names them, for heads of 128."""

    backend: str
    kv_dtypes: tuple[str, ...]
    needs: Need
    modules: tuple[str, ...]
    source: str


TRITON = (
    "vLLM 0.32.0: the backend's kernels are in the wheel (vllm_flash_attn) or Triton's, and so are block tables, input batch and "
    "sampling of the model runner (v1/worker/gpu/)"
)
# Decode is asked for with tensor cores, which FlashInfer serves from the prefill module: one module does both.
FLASHINFER = (
    "vLLM 0.32.0, v1/attention/backends/flashinfer.py: _get_decode_wrapper (use_tensor_cores=True), get_q_data_type (model dtype on "
    "8.9); flashinfer 0.7.0.post1, decode.py: _plan_impl, prefill.py: get_batch_prefill_module"
)
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_{kv}_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0_"
    "use_swa_False_use_logits_cap_False_f16qk_False_kv_stride_equal"
)
COMPILERS = (
    CompilerRow("FLASH_ATTN", (*SIXTEEN_BIT, *FP8), "triton", (), TRITON),
    CompilerRow("FLASHINFER", SIXTEEN_BIT, "flashinfer", (MODULE.format(kv="bf16"),), FLASHINFER),
    CompilerRow("FLASHINFER", FP8, "flashinfer", (MODULE.format(kv="e4m3"),), FLASHINFER),
    CompilerRow("TRITON_ATTN", (*SIXTEEN_BIT, *FP8, *PER_TOKEN_HEAD), "triton", (), TRITON),
)
SAMPLER_MODULE = "sampling"
"""flashinfer 0.7.0.post1, jit/sampling.py: gen_sampling_module."""

NEWEST_GCC = 15
"""The newest g++ that the locked nvcc takes (nvidia-cuda-crt 13.0.88, crt/host_config.h: `#if __GNUC__ > 15` is an error)."""


def sampler_of(variables: Mapping[str, str]) -> str:
    """Which top-k/top-p sampler a card's server is started with: 'flashinfer' or 'vllm' (Triton)."""
    return "flashinfer" if variables.get(SAMPLER, SAMPLER_DEFAULT).strip() not in ("", "0") else "vllm"


def compiler_row(backend: str, kv_dtype: str) -> CompilerRow | None:
    """The row of a backend with a cache; None for what was never read."""
    return next((row for row in COMPILERS if row.backend == backend and kv_dtype in row.kv_dtypes), None)


def compiled_modules(backend: str, kv_dtype: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """FlashInfer's modules that a start compiles where its cache hasn't them yet; empty: Triton alone compiles."""
    row = compiler_row(backend, kv_dtype)
    sampler = (SAMPLER_MODULE,) if sampler_of(variables) == "flashinfer" else ()
    return (*(row.modules if row else ()), *sampler)


def compiler_needs(backends: Iterable[tuple[str, str]], variables: Mapping[str, str]) -> Need:
    """What the most demanding of some (backend, KV dtype) pairs needs; FlashInfer's compiler wants all that Triton wants, and more."""
    needs_flashinfer = any(compiled_modules(backend, kv_dtype, variables) for backend, kv_dtype in backends)
    return "flashinfer" if needs_flashinfer else "triton"
