"""Decides, part by part, whether the plugin acts: where it is told to, else where the stock kernel is missing.

Each part asks for what its stock path really needs, not for a list of processors: int4 needs an operator that only some of
vLLM's libraries contain; FP8 attention needs what `_get_attn_isa` (vllm/v1/attention/backends/cpu_attn.py, 0.32.0) tests.

With AVX-512 both stock paths run, but FP8 isn't the format's: the stock kernel drops mantissa bits instead of rounding
(csrc/cpu/cpu_attn_fp8.hpp, `float_to_fp8e4m3_scalar`), which shrinks keys and values by 4 % and doubles their error (5.0 against
2.6 % RMS, measured). That is what the engine does there, so it is left alone unless the device's settings want the plugin's
kernel, and said in the log (`stock_fp8_rounding`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import UserInputError

VARIABLE = "QUANTGATE_CPU_PLUGIN"
MODES = ("auto", "on", "off")
PARTS = ("int4", "fp8_kv")


@dataclass(frozen=True)
class Needs:
    """Which parts the plugin runs."""

    int4_awq_linear: bool
    fp8_kv_attention: bool

    @property
    def any(self) -> bool:
        return self.int4_awq_linear or self.fp8_kv_attention


def modes(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Part -> mode, as QUANTGATE_CPU_PLUGIN has them: one word for both, or `int4=on,fp8_kv=auto`.

    `UserInputError` for a word that isn't in `MODES` and a part that isn't in `PARTS`.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "auto")
    pairs = value.split(",") if "=" in value else [f"{part}={value}" for part in PARTS]
    words = {part: word for part, _, word in (pair.partition("=") for pair in pairs)}
    for part, word in words.items():
        if part not in PARTS or word not in MODES:
            raise UserInputError(
                f"{VARIABLE}={value!r} isn't one of {', '.join(MODES)}, nor such a word for {' and '.join(PARTS)}"
            )
    return dict.fromkeys(PARTS, "auto") | words


def needs() -> Needs:
    """What the plugin runs in this vLLM process. Loads vLLM's kernel library; never anything on other platforms than an x86 CPU."""
    chosen = modes()
    if set(chosen.values()) == {"off"} or not _x86_cpu():
        return Needs(False, False)
    return Needs(
        chosen["int4"] == "on" or (chosen["int4"] == "auto" and not stock_multiplies_int4()),
        chosen["fp8_kv"] == "on" or (chosen["fp8_kv"] == "auto" and not stock_reads_fp8()),
    )


def needed() -> bool:
    """Whether the plugin runs any part."""
    return needs().any


def stock_multiplies_int4() -> bool:
    """Whether the loaded library has the operator behind `CPUWNA16LinearKernel`."""
    import torch
    from vllm import _custom_ops  # noqa: F401  loads the library that fits the processor

    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def stock_reads_fp8() -> bool:
    """Whether vLLM accepts an FP8 KV cache on this CPU."""
    import torch

    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())


def stock_fp8_rounding() -> str | None:
    """How the stock kernel rounds what it stores in an FP8 cache: 'nearest', 'toward-zero', None where it isn't in use.

    Found by storing 1.1, whose neighbours in e4m3 are 1 and 1.125.
    """
    if not _x86_cpu() or not stock_reads_fp8():
        return None
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens = torch.full((32, 1, 32), 1.1, dtype=torch.bfloat16)
    keys, values = torch.zeros(1, 1, 64, 32, dtype=torch.uint8).chunk(2, dim=2)
    isa = _get_attn_isa(torch.bfloat16, 32, 32, "fp8")
    ops.cpu_attn_reshape_and_cache(tokens, tokens, keys, values, torch.arange(32), isa, kv_cache_dtype="fp8")
    stored = {float(number) for number in keys.contiguous().view(torch.float8_e4m3fn).float().flatten()}
    return {1.0: "toward-zero", 1.125: "nearest"}.get(stored.pop()) if len(stored) == 1 else None


def _x86_cpu() -> bool:
    from vllm.platforms import CpuArchEnum, current_platform

    return bool(current_platform.is_cpu()) and current_platform.get_cpu_architecture() == CpuArchEnum.X86
