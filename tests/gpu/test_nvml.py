"""NVML on a real card: what it says is what CUDA says, and its readings follow a load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.environments import on_device
from pipeline.gpu import GpuSampler, open_nvml, summarise
from pipeline.gpu.selection import engine_environment
from pipeline.results import Gpu
from tests.support.environments import environment_python

pytestmark = pytest.mark.gpu

FACTS = """
import torch
found = torch.cuda.get_device_properties(0)
print(found.total_memory, found.major, found.minor, found.name, sep="|")
"""
BURN = """
import sys, torch
held = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(20):
        left @ left
    torch.cuda.synchronize()
"""


def on_the_card(gpu: Gpu, code: str) -> list[str]:
    return [str(environment_python(on_device("serve", "cuda"))), "-c", code]


@pytest.fixture
def burning(gpu: Gpu) -> Iterator[subprocess.Popen[str]]:
    """A process that multiplies matrices on the card and holds at least 512 MiB of it."""
    process = subprocess.Popen(
        on_the_card(gpu, BURN),
        env={**os.environ, **engine_environment([gpu])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_visible_memory_is_what_torch_sees(gpu: Gpu) -> None:
    """NVML's total less reserved memory is torch's total_memory, and the compute capabilities agree."""
    answer = subprocess.run(
        on_the_card(gpu, FACTS), env={**os.environ, **engine_environment([gpu])}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    total, major, minor, name = answer.stdout.strip().split("|")
    assert abs(int(total) - gpu.memory_visible_bytes) < 64 * 2**20
    assert f"{major}.{minor}" == gpu.compute_capability
    assert name == gpu.name


def test_readings_follow_a_load(gpu: Gpu, burning: subprocess.Popen[str]) -> None:
    """Clocks, temperature, power, utilization and slow-down reasons are read once a second and rise under a load."""
    timeline = []
    with GpuSampler([gpu]) as sampler:
        deadline = time.monotonic() + 8.0
        while time.monotonic() < deadline:
            timeline.append({"running": 1, "gpus": sampler()})
            time.sleep(0.25)
        limits = sampler.power_limits_w
    assert burning.poll() is None
    [found] = summarise([gpu], timeline, limits) or []
    assert 4 <= found.readings <= 9
    assert found.sm_clock_mhz is not None and found.sm_clock_mhz[2] > 0
    assert found.memory_clock_mhz is not None
    assert found.temperature_max_c is not None and 10 < found.temperature_max_c < 110
    assert found.power_max_w is not None and found.power_max_w > 20
    assert found.slowed is not None and found.power_capped is not None
    if not gpu.mig:
        assert found.utilization_mean is not None and found.utilization_mean > 0.5


def test_holders_of_memory_are_named(gpu: Gpu, burning: subprocess.Popen[str]) -> None:
    """A process that holds memory is listed by name and size, or NVML shows no process at all (a container without host pids)."""
    with open_nvml() as nvml:
        found = nvml.processes(gpu)
        held = nvml.held_bytes(gpu)
    assert held >= 512 * 2**20
    mine = [process for process in found if process.pid == burning.pid]
    if not mine:
        assert not any(Path(f"/proc/{process.pid}").exists() for process in found), (
            "pids are ours, but not this one"
        )
        return
    assert mine[0].name and mine[0].name.startswith("python")
    assert mine[0].memory_bytes is None or mine[0].memory_bytes >= 512 * 2**20


def test_doctor_sees_the_card(gpu: Gpu, burning: subprocess.Popen[str]) -> None:
    """`quantgate doctor` on a machine with a card passes its GPU checks and names who holds its memory."""
    answer = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "doctor", "profile=rtx4090", "--json",
         f"device.memory_gib={gpu.memory_visible_bytes / 2**30:.2f}"],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    import json

    checks = {check["name"]: check for check in json.loads(answer.stdout)["checks"]}
    assert checks["GPU"]["status"] in ("ok", "warn")
    assert gpu.name in checks["GPU"]["found"]
    assert checks["driver"]["status"] == "ok"
    assert checks["card memory"]["status"] == "ok"
    assert "are taken" in checks["memory held by others"]["found"]
    assert checks["kernels awq-fp8kv"]["status"] == "ok"
