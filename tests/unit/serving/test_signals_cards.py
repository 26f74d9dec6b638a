"""Start-ups on cards that aren't at hand, as vLLM 0.19 to 0.33 tell them: the same reader as for live ones.

The recordings are written by us after public logs, or after the format strings of the release that they name; each says which in
its first lines.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import EngineFailedError
from pipeline.serving.command import ServeSpec
from pipeline.serving.signals import parse_log
from pipeline.serving.weight_kernel import check_weight_kernel

RECORDED = Path(__file__).resolve().parents[2] / "contract" / "recorded"
MARLIN = "MarlinLinearKernel"
# Recording -> (version, attention backend, weights' kernel, KV dtype, KV scales, pool's tokens, sequences)
STARTS = {
    "0.19-awq-marlin": ("0.19.1", "FLASH_ATTN", MARLIN, "auto", None, 290_864, 33.04),
    "0.19-awq-forced": ("0.19.1", "FLASH_ATTN", "AWQLinearMethod", "auto", None, None, None),
    "0.24-rtx4090-qwen25-7b-bf16": ("0.24.0", "FLASH_ATTN", None, "auto", None, 83_376, 40.71),
    "0.26-h100-tp4": (None, None, None, None, None, None, None),
    "0.27-16gb-card": ("0.27.1", None, None, "auto", None, None, None),
    "0.27-rtx3090-pp2": (None, None, None, None, None, None, None),
    "0.32-rtx4090-awq": ("0.32.0", "FLASH_ATTN", MARLIN, "bfloat16", None, 291_280, 35.56),
    "0.32-rtx4090-awq-pinned": ("0.32.0", "FLASHINFER", MARLIN, "bfloat16", None, 288_512, 35.22),
    "0.32-rtx4090-awq-fp8kv": ("0.32.0", "FLASHINFER", MARLIN, "fp8", "1.0", 577_024, 70.44),
    "0.32-rtx4090-awq-kv-per-token-head": ("0.32.0", "TRITON_ATTN", MARLIN, "fp8_per_token_head", None, 564_928, 68.96),
    "0.32-awq-fallback": ("0.32.0", "FLASH_ATTN", f"AWQLinearMethod+{MARLIN}", "bfloat16", None, None, None),
    "0.32-compressed-tensors-scale-one": ("0.32.0", "FLASHINFER", MARLIN, "fp8", "1.0", None, None),
    # Without the probe nothing tells "scales came" from "nobody looked": null, never a guess.
    "0.32-compressed-tensors-calibrated": ("0.32.0", "FLASHINFER", MARLIN, "fp8", None, None, None),
    "0.33-one-line": ("0.33.0", "FLASH_ATTN", MARLIN, "bfloat16", None, 282_928, 34.54),
}  # fmt: skip
MEMORY = {
    "0.19-awq-marlin": {"model_loading_gib": 5.2, "available_kv_cache_gib": 14.31},
    "0.24-rtx4090-qwen25-7b-bf16": {
        "model_loading_gib": 14.29, "available_kv_cache_gib": 4.45, "cuda_graphs_gib": 0.53,
    },
    "0.26-h100-tp4": {"weights_gib": 7.39, "activation_gib": 1.54, "non_torch_gib": 0.6, "cuda_graphs_gib": 2.04},
    "0.27-16gb-card": {
        "available_kv_cache_gib": 3.01, "consumed_gib": 10.47, "activation_gib": 0.79, "cuda_graphs_gib": 0.04,
    },
    "0.27-rtx3090-pp2": {
        "available_kv_cache_gib": 1.95, "consumed_gib": 19.47, "activation_gib": 0.02, "cuda_graphs_gib": 0.58,
        "cuda_graphs_taken_gib": 0.1,
    },
    "0.32-rtx4090-awq-fp8kv": {
        "model_loading_gib": 5.25, "available_kv_cache_gib": 15.41, "consumed_gib": 5.57, "activation_gib": 0.32,
        "cuda_graphs_gib": 0.45, "cuda_graphs_taken_gib": 0.4,
    },
}  # fmt: skip


def text(name: str) -> str:
    return (RECORDED / f"log-{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STARTS)
def test_recorded_start(name: str) -> None:
    log = parse_log(text(name))
    assert (
        log.version, log.attention_backend, log.weights_kernel, log.kv_cache_dtype, log.kv_scales, log.kv_cache_tokens,
        log.max_concurrency,
    ) == STARTS[name]  # fmt: skip
    assert log.emulated == ()


@pytest.mark.parametrize("name", MEMORY)
def test_memory_terms(name: str) -> None:
    assert parse_log(text(name)).memory_gib == MEMORY[name]


@pytest.mark.parametrize(
    ("name", "requested_gib"),
    [
        ("0.27-rtx3090-pp2", 22.03),
        ("0.27-16gb-card", 14.27),
        ("0.32-rtx4090-awq", 21.75),
        ("0.32-rtx4090-awq-fp8kv", 21.75),
    ],
)
def test_the_terms_add_up_to_what_was_asked_for(name: str, requested_gib: float) -> None:
    """Consumed, activation, graphs and KV cache: nothing counted twice, nothing left out (each known to 0.005 GiB).

    It fails for a start whose graphs' estimate isn't named (0.27-16gb-card) if that was taken out of the activation twice.
    """
    memory = parse_log(text(name)).memory_gib
    counted = memory["cuda_graphs_gib"] if "cuda_graphs_taken_gib" in memory else 0.0
    total = memory["consumed_gib"] + memory["activation_gib"] + counted + memory["available_kv_cache_gib"]
    assert total == pytest.approx(requested_gib, abs=0.021)


def test_every_recording_of_a_start_is_read() -> None:
    found = {
        path.stem.removeprefix("log-") for path in RECORDED.glob("log-*.txt") if "-cpu-" not in path.name
    }
    assert found == set(STARTS)
    assert all(text(name).startswith("# ") for name in STARTS), "each names its source"


SPEC = ServeSpec(
    engine_version="0.32.0",
    model_dir=Path("…/awq"),
    served_name="awq",
    target="cuda",
    max_model_len=8192,
    max_num_seqs=128,
    gpu_memory_utilization=0.92,
)
LOG = Path("serve.log")


@pytest.mark.parametrize(
    ("name", "kernel"), [("0.19-awq-forced", "AWQLinearMethod"), ("0.32-awq-fallback", "AWQLinearMethod")]
)
def test_the_slow_kernel_is_refused_on_a_card(name: str, kernel: str) -> None:
    with pytest.raises(
        EngineFailedError, match=rf"awq: the engine runs its 4-bit weights on {kernel} instead of Marlin"
    ):
        check_weight_kernel(SPEC, "awq", 89, parse_log(text(name)), LOG)


def test_marlin_plain_weights_a_cpu_and_a_named_kernel_are_not() -> None:
    slow = parse_log(text("0.32-awq-fallback"))
    check_weight_kernel(SPEC, "awq", 89, parse_log(text("0.32-rtx4090-awq")), LOG)
    check_weight_kernel(SPEC, "none", 89, slow, LOG)
    check_weight_kernel(SPEC, "pack-quantized", 89, parse_log(""), LOG)
    check_weight_kernel(replace(SPEC, extra_args=("--linear-backend", "conch")), "awq", 89, slow, LOG)
    on_cpu = replace(SPEC, target="cpu", gpu_memory_utilization=None, kv_cache_memory_bytes=1)
    check_weight_kernel(on_cpu, "awq", None, slow, LOG)


CUTLASS, MARLIN_FP8 = "CutlassFP8ScaledMMLinearKernel", "MarlinFP8ScaledMMLinearKernel"


@pytest.mark.parametrize(
    ("capability", "kernel", "said"),
    [
        (89, CUTLASS, None),
        (None, CUTLASS, None),
        (86, MARLIN_FP8, None),
        (89, MARLIN_FP8, f"its 8-bit float weights on {MARLIN_FP8} instead of {CUTLASS}"),
        (89, "ChannelWiseTorchFP8ScaledMMLinearKernel", f"instead of {CUTLASS}"),
        (86, CUTLASS, f"on {CUTLASS} instead of {MARLIN_FP8}"),
    ],
)
def test_fp8_weights_belong_on_the_units_that_the_card_has(
    capability: int | None, kernel: str, said: str | None
) -> None:
    log = parse_log(f"INFO Selected {kernel} for CompressedTensorsW8A8Fp8")
    assert log.weights_kernel == kernel
    with contextlib.nullcontext() if said is None else pytest.raises(EngineFailedError, match=said):
        check_weight_kernel(SPEC, "float-quantized", capability, log, LOG)


@pytest.mark.parametrize("name", ["0.32-rtx4090-awq", "0.33-one-line", "0.19-awq-marlin"])
def test_a_changed_line_leaves_a_null_not_a_wrong_name(name: str) -> None:
    changed = (
        text(name)
        .replace("attention backend", "attention implementation")
        .replace("LinearKernel for", "LinearOp for")
    )
    log = parse_log(changed.replace("LinearKernel", "LinearOp"))
    assert (log.attention_backend, log.weights_kernel) == (None, None)
