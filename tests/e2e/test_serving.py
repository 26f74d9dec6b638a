"""One life of the real engine: start, capacity, completion, metrics, stop, and nothing left; and a start that must fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests

from pipeline.errors import EngineFailedError
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.sampler import MetricsSampler
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from tests.support.environments import environment_python
from tests.support.patience import ENGINE_START_S, PATIENCE_S, wait_until_empty

REPOSITORY = Path(__file__).resolve().parents[2]
KAPPA_BYTES = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M: K and V, 30 layers, 3 KV heads, head size 64, BF16
POOL_BYTES = 80 * 2**20
BLOCK = 128


def spec(model: Path, kv_cache_memory_bytes: int = POOL_BYTES) -> ServeSpec:
    return ServeSpec(
        engine_version=locked_engine()[1],
        model_dir=model,
        served_name="bf16",
        target="cpu",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_dtype="bfloat16",
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        block_size=BLOCK,
    )


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def abandoned(names: set[str]) -> set[str]:
    """Those pieces of shared memory that no process has mapped: whatever else this machine runs has its own."""
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mapped.update(Path(region.path).name for region in process.memory_maps())
    return names - mapped


def test_life_of_the_engine(prepared_model: Path, tmp_path: Path) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    with serve(
        spec(prepared_model), environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S
    ) as server:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(processes) >= 3, "API server, engine core, worker"
        with MetricsSampler(server.base_url, interval_s=0.2) as sampler:
            body = {"model": "bf16", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            answer = requests.post(f"{server.base_url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        server.check()
        log, metrics = parse_log(server.log_text()), parse_metrics(server.metrics_text())
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8
    tokens, sequences = reported_capacity(log, metrics)
    assert tokens == POOL_BYTES // (KAPPA_BYTES * BLOCK) * BLOCK
    assert sequences == tokens / 512
    assert log.kv_cache_dtype == "bfloat16"
    assert log.attention_backend is not None
    assert log.kv_scales is None
    assert log.weights_kernel is None
    assert log.emulated == ()
    assert log.plugin is not None, "the plugin's line must be in every log, active or not"
    assert sampler.failures == 0
    assert sampler.timeline[-1]["generation_tokens_total"] >= 8
    assert alive(processes) == []
    assert abandoned(set(os.listdir("/dev/shm")) - shared_before) == set()


def test_pool_too_small_for_one_request_is_said_in_a_sentence(prepared_model: Path, tmp_path: Path) -> None:
    small = spec(prepared_model, kv_cache_memory_bytes=KAPPA_BYTES * BLOCK * 2)
    with (
        pytest.raises(EngineFailedError, match="not even one request fits") as caught,
        serve(small, environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S),
    ):
        pytest.fail("it started")
    assert str(tmp_path / "serve.log") in str(caught.value)


PARENT = """
import sys, time
from pathlib import Path
from pipeline.serving.server import serve
from tests.e2e.test_serving import ENGINE_START_S, spec
model, python, log = map(Path, sys.argv[1:])
with serve(spec(model), python, log, ENGINE_START_S) as server:
    print(server.pid, flush=True)
    time.sleep(3600)
"""


def test_engine_of_a_killed_owner_is_gone(prepared_model: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", PARENT, prepared_model, environment_python("serve"), tmp_path / "serve.log"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    processes = [server, *server.children(recursive=True)]
    owner.kill()
    owner.wait()
    wait_until_empty(lambda: alive(processes))
