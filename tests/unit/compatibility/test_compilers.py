"""What a start compiles: FlashInfer's modules for its own backend and sampler, Triton's everywhere."""

from __future__ import annotations

import pytest

from pipeline.compatibility.attention import ATTENTION
from pipeline.compatibility.compilers import (
    COMPILERS,
    SAMPLER,
    compiled_modules,
    compiler_needs,
    compiler_row,
    sampler_of,
)


def test_every_backend_of_a_card_has_a_row_for_each_cache_it_keeps() -> None:
    kept = {(row.backend, dtype) for row in ATTENTION if row.kind == "cuda" for dtype in row.kv_dtypes}
    assert kept == {(row.backend, dtype) for row in COMPILERS for dtype in row.kv_dtypes}
    assert all(row.source for row in COMPILERS)
    assert compiler_row("CPU_ATTN", "bfloat16") is None


@pytest.mark.parametrize(("value", "sampler"), [(None, "vllm"), ("0", "vllm"), ("1", "flashinfer")])
def test_the_sampler_is_vllms_unless_the_settings_say_so(value: str | None, sampler: str) -> None:
    variables = {} if value is None else {SAMPLER: value}
    assert sampler_of(variables) == sampler
    extra = ("sampling",) if sampler == "flashinfer" else ()
    assert compiled_modules("FLASH_ATTN", "bfloat16", variables) == extra
    assert compiled_modules("FLASHINFER", "fp8", variables)[1:] == extra
    assert compiler_needs([("TRITON_ATTN", "fp8_per_token_head")], variables) == (
        "flashinfer" if extra else "triton"
    )


def test_one_variant_on_flashinfer_asks_for_its_compiler() -> None:
    assert compiler_needs([("FLASH_ATTN", "bfloat16"), ("TRITON_ATTN", "fp8")], {}) == "triton"
    assert compiler_needs([("FLASH_ATTN", "bfloat16"), ("FLASHINFER", "bfloat16")], {}) == "flashinfer"
    (bf16,), (fp8,) = (compiled_modules("FLASHINFER", dtype, {}) for dtype in ("bfloat16", "fp8"))
    assert "dtype_kv_bf16" in bf16 and "dtype_kv_e4m3" in fp8
