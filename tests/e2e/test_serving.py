"""One life of the real engine: start, capacity, completion, metrics, stop, and nothing left; and a start that must fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
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
from tests.support.patience import ENGINE_START_S, PATIENCE_S, wait_until, wait_until_empty
from tests.support.processes import alive

REPOSITORY = Path(__file__).resolve().parents[2]
KAPPA_BYTES = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M: K and V, 30 layers, 3 KV heads, head size 64, BF16
POOL_BYTES = 80 * 2**20
BLOCK = 128


USUAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The worker in a process of its own, as vLLM has it on a card."""


def spec(
    model: Path, kv_cache_memory_bytes: int = POOL_BYTES, environment: Mapping[str, str] | None = None
) -> ServeSpec:
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
        environment=environment or {},
    )


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files of shared memory that these processes have mapped; whatever else this machine runs has its own."""
    mapped = {Path(region.path) for process in alive(processes) for region in process.memory_maps()}
    return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}


def test_life_of_the_engine(prepared_model: Path, tmp_path: Path) -> None:
    usual = spec(prepared_model, environment=USUAL)
    with serve(usual, environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S) as server:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(processes) >= 3, "API server, engine core, worker"
        with MetricsSampler(server.base_url, interval_s=0.2) as sampler:
            body = {"model": "bf16", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            answer = requests.post(f"{server.base_url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            wait_until(lambda: any((row["generation_tokens_total"] or 0) >= 8 for row in sampler.timeline))
        shared = shared_memory(processes)
        assert shared, "the engine core and its worker talk through it"
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
    assert alive(processes) == []
    assert not any(path.exists() for path in shared)


def test_pool_too_small_for_one_request_is_said_in_a_sentence(prepared_model: Path, tmp_path: Path) -> None:
    small = spec(prepared_model, kv_cache_memory_bytes=KAPPA_BYTES * BLOCK * 2)
    with (
        pytest.raises(EngineFailedError, match="not even one request fits") as caught,
        serve(small, environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S),
    ):
        pytest.fail("it started")
    assert str(tmp_path / "serve.log") in str(caught.value)


PARENT = """
import sys
from collections.abc import Mapping
from pathlib import Path
from pipeline.serving.server import serve
from tests.e2e.test_serving import ENGINE_START_S, spec
model, python, log = map(Path, sys.argv[1:])
with serve(spec(model), python, log, ENGINE_START_S) as server:
    print(server.pid, server.port, flush=True)
    sys.stdin.read()  # until the test kills it, or is killed itself
"""


def listens(process: psutil.Process, port: int) -> bool:
    """At this port; the engine core has one of its own, for workers on other machines."""
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections("tcp")
    )


def test_engine_of_a_killed_owner_is_gone(prepared_model: Path, tmp_path: Path) -> None:
    """The lean engine: two processes, the core forked off the API server without its port, and known by its log all the same."""
    owner = subprocess.Popen(
        [sys.executable, "-c", PARENT, prepared_model, environment_python("serve"), tmp_path / "serve.log"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, port = map(int, owner.stdout.readline().split())
    server = psutil.Process(pid)
    processes = [server, *server.children(recursive=True)]
    assert [listens(process, port) for process in processes] == [True, False]
    log = (tmp_path / "serve.log").read_text()
    assert log.count("quantgate-cpu-plugin:") == log.count("quantgate-provenance:") == 1
    assert "is started anew" not in log
    owner.kill()
    owner.wait()
    wait_until_empty(lambda: alive(processes))
