"""What can be quantized and served where: every refusal names its fix, and what is known to work is let through."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.capacity import Geometry
from pipeline.compatibility import (
    QUANTIZERS,
    WEIGHT_KERNELS,
    Engine,
    Request,
    attention_backends,
    attention_refusals,
    quantizer_refusals,
    weight_kernel,
    weight_refusals,
)
from pipeline.compatibility.attention import ATTENTION
from tests.support.geometries import QWEN25_7B, SMOLLM2

QWEN, SMOL = Geometry.from_config(QWEN25_7B), Geometry.from_config(SMOLLM2)


def geometry(**changes: Any) -> Geometry:
    return Geometry.from_config({**SMOLLM2, **changes})


def card(capability: int, **changes: Any) -> Engine:
    return Engine("0.32.0", "cuda", capability, **changes)


def cpu(*flags: str) -> Engine:
    return Engine("0.32.0", "cpu", None, flags)


# --- quantizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", sorted(QUANTIZERS))
@pytest.mark.parametrize(("model", "group"), [(QWEN, 128), (QWEN, 64), (SMOL, 64), (SMOL, 32)])
def test_what_runs_is_let_through(backend: str, model: Geometry, group: int) -> None:
    assert quantizer_refusals(model, Request(backend, group)) == []


@pytest.mark.parametrize(
    ("model", "request_", "words", "fix"),
    [
        (SMOL, Request("autoawq", 128), "128 doesn't divide the 576 inputs of self_attn.q_proj", "use group_size 32 or 64"),
        # 3584 inputs of o_proj: 1792 a card on two, a multiple of 128; 448 on eight are not.
        (QWEN, Request("autoawq", 128, 8), "448 inputs of self_attn.o_proj that each of 8 cards holds", "group_size 32 or 64"),
        (geometry(intermediate_size=1500), Request("llmcompressor", 64), "1500 inputs", "keep it in BF16"),
        (SMOL, Request("autoawq", 64, 2), "288 inputs of self_attn.o_proj that each of 2", "use group_size 32"),
        (SMOL, Request("autoawq", 32, 4), "144 inputs", "tensor_parallel below 4"),
        (geometry(head_dim=60), Request("autoawq", 64), "540 inputs of self_attn.o_proj", "keep it in BF16"),
        (geometry(architectures=["Gemma2ForCausalLM"]), Request("autoawq", 64), "nothing here proves", "Qwen3"),
        (SMOL, Request("gptq", 64), "'gptq' isn't in the compatibility table", "autoawq or llmcompressor"),
    ],
)  # fmt: skip
def test_what_does_not_is_refused_with_the_fix(
    model: Geometry, request_: Request, words: str, fix: str
) -> None:
    found = quantizer_refusals(model, request_)
    assert found and words in found[0].what
    assert fix in found[0].fix
    assert found[0].source and found[0].source in str(found[0])


def test_an_architecture_that_no_backend_knows_is_named() -> None:
    model = geometry(architectures=["MixtralForCausalLM"], num_local_experts=8)
    [refusal] = quantizer_refusals(model, Request("llmcompressor", 64))
    assert "llmcompressor has no rules for MixtralForCausalLM" in refusal.what
    assert "LlamaForCausalLM" in refusal.fix


def test_a_method_is_its_makers() -> None:
    [refusal] = quantizer_refusals(SMOL, Request("autoawq", 64, method="gptq"))
    assert "autoawq makes no gptq weights" in refusal.what and "llmcompressor" in refusal.fix
    assert quantizer_refusals(SMOL, Request("llmcompressor", 64, method="gptq")) == []
    # A scale per output: whatever the width.
    assert (
        quantizer_refusals(geometry(intermediate_size=1500), Request("llmcompressor", None, method="fp8"))
        == []
    )
    # GPTQ and FP8 need no rules of folding, but a proof of what they make.
    [refusal] = quantizer_refusals(
        geometry(architectures=["Gemma2ForCausalLM"]), Request("llmcompressor", None, method="fp8")
    )
    assert "nothing here proves its result" in refusal.what


def test_calibrating_kv_scales_alone_packs_nothing() -> None:
    assert quantizer_refusals(geometry(intermediate_size=1500), Request("llmcompressor", None)) == []


# --- the engine's weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "kernel"),
    [
        (card(89), "MarlinLinearKernel"),
        (card(75), "MarlinLinearKernel"),
        (card(70), None),
        (Engine("0.32.0", "cuda"), "MarlinLinearKernel"),
        (cpu("avx2", "avx512f"), "CPUWNA16LinearKernel"),
        (cpu("avx2"), "Int4PackLinearKernel"),
        (cpu(), None),
    ],
)
def test_the_kernel_of_4_bit_weights(engine: Engine, kernel: str | None) -> None:
    for scheme_format in ("awq", "pack-quantized"):
        found = weight_kernel(engine, scheme_format)
        assert (found.kernel if found else None) == kernel
    assert bool(weight_refusals(QWEN, engine, "awq", 128)) == (kernel is None)


@pytest.mark.parametrize(
    ("engine", "kernel"),
    [
        (card(89), "CutlassFP8ScaledMMLinearKernel"),
        (card(120), "CutlassFP8ScaledMMLinearKernel"),
        (card(86), "MarlinFP8ScaledMMLinearKernel"),
        (card(70), None),
        (cpu(), "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    ],
)
def test_the_kernel_of_8_bit_float_weights(engine: Engine, kernel: str | None) -> None:
    found = weight_kernel(engine, "float-quantized")
    assert (found.kernel if found else None) == kernel
    refusals = weight_refusals(QWEN, engine, "float-quantized", None)
    assert bool(refusals) == (kernel is None)
    assert (
        not refusals
        or "8-bit float weights need compute capability 7.5, this card has 7.0" in refusals[0].what
    )


def test_weights_that_no_kernel_takes_are_refused_with_the_fix() -> None:
    assert "compute capability 7.5, this card has 7.0" in weight_refusals(QWEN, card(70), "awq", 128)[0].what
    assert "no kernel on cuda reads" in weight_refusals(QWEN, card(89), "gguf", 128)[0].what
    assert "has no group size 256" in weight_refusals(QWEN, card(89), "awq", 256)[0].what
    assert "avx512f or avx2" in weight_refusals(QWEN, cpu(), "awq", 128)[0].what


def test_a_joined_module_is_what_the_kernel_sees() -> None:
    # q, k and v of 8 + 2 x 1 heads of 24: 192 + 48 outputs, no multiple of 32 together, nor is k alone of 16.
    model = geometry(num_attention_heads=8, num_key_value_heads=1, head_dim=24, hidden_size=576)
    [refusal] = weight_refusals(model, cpu("avx512f"), "awq", 32)
    assert "multiple of 32 outputs, self_attn.qkv_proj has 240" in refusal.what
    assert weight_refusals(SMOL, cpu("avx512f"), "awq", 64) == []  # 576 + 192 + 192 = 960
    assert weight_refusals(model, card(89), "awq", 32) == []  # Marlin pads


# --- KV cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "engine", "backends"),
    [
        ("bfloat16", card(89), ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
        ("fp8", card(89), ["FLASHINFER", "TRITON_ATTN"]),  # an Ada card: FlashAttention 2 has none
        ("fp8", card(86), ["FLASHINFER"]),
        ("fp8", card(90), ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
        ("fp8", card(100), ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"]),
        ("fp8", card(120), ["FLASHINFER", "TRITON_ATTN"]),
        ("fp8_per_token_head", card(89), ["TRITON_ATTN"]),
        ("fp8_per_token_head", card(86), []),
        ("int8_per_token_head", card(86), ["TRITON_ATTN"]),
        ("bfloat16", card(75), []),
        ("bfloat16", cpu("avx2"), ["CPU_ATTN"]),
        ("fp8", cpu("avx2"), ["CPU_ATTN_FP8"]),
        ("fp8", cpu("avx2", "avx512f"), ["CPU_ATTN", "CPU_ATTN_FP8"]),
        ("fp8_per_token_head", cpu("avx2", "avx512f"), []),
    ],
)
def test_backends_in_the_engines_order(dtype: str, engine: Engine, backends: list[str]) -> None:
    assert [row.backend for row in attention_backends(dtype, engine, 128)] == backends
    assert bool(attention_refusals(dtype, engine, 128)) == (not backends)


@pytest.mark.parametrize(
    ("dtype", "engine", "head", "pinned", "words", "fix"),
    [
        ("fp8", card(75), 128, None, "needs compute capability 8.0 (FLASHINFER), this card has 7.5", "kv_cache_dtype bfloat16"),
        ("fp8_per_token_head", card(86), 128, None, "needs compute capability 8.9 (TRITON_ATTN)", "newer card"),
        ("fp8", card(89), 128, "FLASH_ATTN", "FLASH_ATTN keeps no fp8 KV cache here", "pin FLASHINFER or TRITON_ATTN"),
        ("fp8_per_token_head", cpu("avx2"), 128, None, "on cpu keeps a KV cache of fp8_per_token_head", "fp8"),
        ("fp8", cpu(), 64, None, "needs avx2 or avx512f", "bfloat16"),
        ("bfloat16", cpu("avx2"), 48, None, "heads of 48", "bfloat16"),
    ],
)  # fmt: skip
def test_a_cache_that_nothing_keeps_is_refused_with_the_fix(
    dtype: str, engine: Engine, head: int, pinned: str | None, words: str, fix: str
) -> None:
    [refusal] = attention_refusals(dtype, engine, head, pinned)
    assert words in refusal.what
    assert fix in refusal.fix
    assert refusal.source


def test_a_pinned_backend_that_can_is_let_through() -> None:
    assert attention_refusals("bfloat16", card(89), 128, "FLASHINFER") == []


def test_every_row_names_file_and_version() -> None:
    for row in (*WEIGHT_KERNELS, *ATTENTION):
        assert row.source.startswith("vLLM 0.32, ") or row.emulated
    for quantizer in QUANTIZERS.values():
        for source in (
            quantizer.architectures_source,
            quantizer.inputs_source,
            quantizer.outputs_source,
            quantizer.dtype_source,
        ):
            assert any(character.isdigit() for character in source) and ("/" in source or ":" in source)


def test_tables_of_one_version_say_so() -> None:
    assert Engine("0.32.1", "cpu").is_read
    assert not Engine("0.33.0", "cpu").is_read
    assert not Engine("0.3.2", "cpu").is_read
