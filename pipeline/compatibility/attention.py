"""Which of the engine's attention backends keeps which KV cache on which device. Read from vLLM 0.32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.compatibility.refusal import Refusal
from pipeline.compatibility.weights import Engine

SIXTEEN_BIT = ("bfloat16", "float16")
FP8 = ("fp8", "fp8_e4m3")


@dataclass(frozen=True)
class AttentionRow:
    """One backend with one family of KV dtypes. Capabilities as 89 for 8.9, both ends included."""

    backend: str
    kv_dtypes: tuple[str, ...]
    kind: Literal["cpu", "cuda"]
    lowest: int
    highest: int
    head_sizes: tuple[int, ...] | None
    """None: multiples of `head_multiple` up to `head_most`."""
    head_multiple: int
    head_most: int
    cpu_flag: str | None
    emulated: bool
    source: str

    def takes_head(self, size: int) -> bool:
        if self.head_sizes is not None:
            return size in self.head_sizes
        return size % self.head_multiple == 0 and size <= self.head_most

    def runs_on(self, engine: Engine) -> bool:
        if self.kind != engine.kind or (self.cpu_flag and self.cpu_flag not in engine.cpu_flags):
            return False
        return engine.capability is None or self.lowest <= engine.capability <= self.highest


NEWEST = 10_000
FLASH = "vLLM 0.32, v1/attention/backends/flash_attn.py and fa_utils.py: flash_attn_supports_kv_cache_dtype"
INFER = (
    "vLLM 0.32, v1/attention/backends/flashinfer.py: supported_kv_cache_dtypes, supports_compute_capability"
)
TRITON = "vLLM 0.32, v1/attention/backends/triton_attn.py: TritonAttentionImpl.__init__"
CPU = "vLLM 0.32, v1/attention/backends/cpu_attn.py: _get_attn_isa"
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
INFER_HEADS = (64, 128, 256, 512)
# FlashAttention 2 has no FP8 KV; 3 has it on 9.x, 4 on 10.x. e5m2 is left out: vLLM issue 41343 found it silently corrupt.
# Every backend runs from 8.0 on with a 16-bit cache (bfloat16 needs it, and so does FlashAttention 2).
ATTENTION = (
    AttentionRow("FLASH_ATTN", SIXTEEN_BIT, "cuda", 80, NEWEST, None, 8, 256, None, False, FLASH),
    AttentionRow("FLASH_ATTN", FP8, "cuda", 90, 99, None, 8, 256, None, False, FLASH),
    AttentionRow("FLASH_ATTN", FP8, "cuda", 100, 109, None, 8, 128, None, False, FLASH),
    AttentionRow("FLASHINFER", (*SIXTEEN_BIT, *FP8), "cuda", 80, 121, INFER_HEADS, 1, 0, None, False, INFER),
    AttentionRow("TRITON_ATTN", SIXTEEN_BIT, "cuda", 80, NEWEST, None, 1, NEWEST, None, False, TRITON),
    AttentionRow("TRITON_ATTN", FP8, "cuda", 89, NEWEST, None, 1, NEWEST, None, False, TRITON),
    AttentionRow("TRITON_ATTN", ("fp8_per_token_head",), "cuda", 89, NEWEST, None, 1, NEWEST, None, False, TRITON),
    AttentionRow(
        "TRITON_ATTN", ("int8_per_token_head", "int4_per_token_head"), "cuda", 75, NEWEST, None, 1, NEWEST, None, False, TRITON
    ),
    AttentionRow("CPU_ATTN", SIXTEEN_BIT, "cpu", 0, 0, CPU_HEADS, 1, 0, None, False, CPU),
    AttentionRow("CPU_ATTN", FP8, "cpu", 0, 0, None, 32, 512, "avx512f", False, CPU),
    AttentionRow(
        "CPU_ATTN_FP8", FP8, "cpu", 0, 0, CPU_HEADS, 1, 0, "avx2", True, "pipeline/serving/cpu_plugin/fp8_attention.py"
    ),
)  # fmt: skip
STOCK_FP8_KV, PLUGIN_FP8_KV = (
    row.backend for row in ATTENTION if row.kind == "cpu" and "fp8" in row.kv_dtypes
)
"""The two that a CPU can read an FP8 cache with: the engine's own and the plugin's."""
ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN", "CPU_ATTN_FP8")
ORDER_ON_10 = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")
"""vLLM 0.32, platforms/cuda.py: _get_backend_priorities. The first that fits is taken."""


def attention_backends(kv_dtype: str, engine: Engine, head_size: int) -> list[AttentionRow]:
    """The backends that keep this cache here, the one that the engine takes by itself first."""
    order = ORDER_ON_10 if engine.capability is not None and engine.capability // 10 == 10 else ORDER
    fitting = [
        row
        for row in ATTENTION
        if kv_dtype in row.kv_dtypes and row.runs_on(engine) and row.takes_head(head_size)
    ]
    return sorted(fitting, key=lambda row: order.index(row.backend))


def attention_refusals(
    kv_dtype: str, engine: Engine, head_size: int, pinned: str | None = None
) -> list[Refusal]:
    """Why no backend, or not the pinned one, keeps this cache on this device, with what to do instead."""
    fitting = [row.backend for row in attention_backends(kv_dtype, engine, head_size)]
    if fitting and (pinned is None or pinned in fitting):
        return []
    rows = [row for row in ATTENTION if row.kind == engine.kind and kv_dtype in row.kv_dtypes]
    if not rows:
        known = sorted({name for row in ATTENTION if row.kind == engine.kind for name in row.kv_dtypes})
        return [
            Refusal(
                f"no attention backend on {engine.kind} keeps a KV cache of {kv_dtype}",
                f"use {', '.join(known)}",
                "pipeline/compatibility/attention.py",
            )
        ]
    if fitting:
        source = next((row.source for row in rows if row.backend == pinned), rows[0].source)
        return [Refusal(f"{pinned} keeps no {kv_dtype} KV cache here", f"pin {' or '.join(fitting)}", source)]
    wide = [row for row in rows if row.takes_head(head_size)]
    if not wide:
        return [
            Refusal(f"no backend keeps {kv_dtype} with heads of {head_size}", "use bfloat16", rows[0].source)
        ]
    if engine.kind == "cpu":
        flags = " or ".join(sorted({row.cpu_flag for row in wide if row.cpu_flag}))
        return [Refusal(f"a {kv_dtype} KV cache on a CPU needs {flags}", "use bfloat16", wide[0].source)]
    lowest = min(wide, key=lambda row: row.lowest)
    return [
        Refusal(
            f"a {kv_dtype} KV cache needs compute capability {lowest.lowest / 10:.1f} ({lowest.backend}), this card has "
            f"{(engine.capability or 0) / 10:.1f}",
            "use a newer card, or kv_cache_dtype bfloat16"
            if kv_dtype not in SIXTEEN_BIT
            else "use a newer card",
            lowest.source,
        )
    ]
