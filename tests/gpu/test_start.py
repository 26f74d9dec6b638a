"""The engine on a real card: random weights of Qwen2.5-7B's geometry, CUDA graphs on, every memory term against the planner.

Each start leaves its record in runs/gpu-test/rtx4090/, which `quantgate calibrate` reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from pipeline.capacity import GIB, Geometry, kv_layout
from pipeline.capacity.layers import Attention
from pipeline.compatibility import Engine, attention_backends, weight_format, weight_kernel
from pipeline.environments import on_device
from pipeline.gpu import GpuSampler, lowest_capability, summarise
from pipeline.planning.calibrate import CARD_TOLERANCE_BYTES
from pipeline.planning.scenario import rules_of
from pipeline.results import Gpu, GpuLoad, MemoryRun, PlanRow, save
from pipeline.serving.sampler import MetricsSampler
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from pipeline.settings import Settings
from pipeline.stages.context import pool_bytes
from tests.support.dummy_start import (
    PROFILE,
    VARIANTS,
    card_settings,
    dummy_server,
    dummy_spec,
    memory_run,
    planned,
    write_checkpoints,
)
from tests.support.environments import environment_python

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "runs" / "gpu-test" / PROFILE
ROUNDING_GIB = 0.005
"""Half of the last decimal that the log prints."""


ONCE = pytest.mark.parametrize("start", VARIANTS[:1], indirect=True)
"""Of claims that no variant changes."""


@dataclass(frozen=True)
class Start:
    """One start, ended again: its record, its log's memory terms, what the card did under a short load."""

    settings: Settings
    row: PlanRow
    run: MemoryRun
    memory_gib: dict[str, float]
    load: GpuLoad | None
    command: list[str]


@pytest.fixture(scope="session")
def settings(gpu: Gpu) -> Settings:
    """The profile on the card that is there: with its own memory where it isn't the profile's."""
    plain = card_settings(ROOT)
    if abs(gpu.memory_visible_bytes - plain.device.memory_bytes) <= CARD_TOLERANCE_BYTES:
        return plain
    return card_settings(ROOT, f"device.memory_gib={gpu.memory_visible_bytes / GIB:.3f}")


@pytest.fixture(scope="session")
def folder(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpu")
    write_checkpoints(settings, found)
    return found


@pytest.fixture(scope="module", params=VARIANTS)
def start(request: pytest.FixtureRequest, settings: Settings, folder: Path) -> Iterator[Start]:
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        log = folder / f"{name}.log"
        with dummy_server(settings, name, environment_python(on_device("serve", "cuda")), log) as (
            server,
            row,
        ):
            with (
                GpuSampler(server.gpus) as read_gpus,
                MetricsSampler(server.base_url, 0.5, read_gpus) as sampler,
            ):
                deadline = time.monotonic() + 10.0
                while time.monotonic() < deadline:
                    body: dict[str, Any] = {
                        "model": name, "prompt": "word " * 200, "max_tokens": 64, "ignore_eos": True, "n": 8, "temperature": 1,
                    }  # fmt: skip
                    requests.post(
                        f"{server.base_url}/v1/completions", json=body, timeout=120
                    ).raise_for_status()
            run = memory_run(settings, name, row, server)
            loads = summarise(server.gpus, sampler.timeline, read_gpus.power_limits_w) or [None]  # type: ignore[list-item]
            memory = parse_log(server.log_text()).memory_gib
            save(RECORDS / f"{name}.json", run)
            yield Start(settings, row, run, memory, loads[0], server.command)


@ONCE
def test_cuda_graphs_are_captured(start: Start) -> None:
    """Qwen2.5-7B's geometry starts with CUDA graphs through our launcher, and the log gives their memory."""
    assert "--enforce-eager" not in start.command
    assert start.memory_gib.get("cuda_graphs_gib", 0.0) > 0.0


def test_kernels_are_those_that_the_tables_name(start: Start, gpu: Gpu) -> None:
    """The engine takes the attention backend, the linear kernel and the KV dtype that doctor promised."""
    found, row = start.run.provenance, start.row
    engine = Engine(start.settings.server.engine_version, "cuda", lowest_capability([gpu]))
    head = _head(start.settings)
    promised = [backend.backend for backend in attention_backends(row.kv_cache_dtype, engine, head)]
    pinned = start.settings.variants[row.variant].attention_backend
    assert found.attention_backend in ([pinned] if pinned else promised)
    assert (found.kv_cache_dtype or "").startswith(row.kv_cache_dtype)
    if row.weights == "bf16":
        assert found.weights_kernel is None
    else:
        # The stages' own check: it names the kernel that each format is meant to run on.
        weights = weight_format(start.settings.quantizers[row.weights])
        row_of_kernel = weight_kernel(engine, weights)
        assert row_of_kernel is not None and found.weights_kernel in (
            row_of_kernel.kernel,
            "MacheteLinearKernel",
        )


def test_the_pool_is_the_arithmetic_of_the_reported_terms(start: Start) -> None:
    """What the log calls available is u*V less the terms it names, and the pool is that many bytes of whole blocks."""
    gib, utilization = start.memory_gib, start.settings.device.memory_utilization
    [memory] = start.run.provenance.gpu_memory or []
    # "Consumed" is weights with what is outside PyTorch (vLLM 0.32 v1/worker/gpu_worker.py).
    taken = [gib[name] for name in ("consumed_gib", "activation_gib", "cuda_graphs_gib")]
    left = utilization * memory.visible_bytes / GIB - sum(taken)
    # Each of four figures is rounded, and NVML's total and CUDA's may differ by a page of the driver's.
    assert gib["available_kv_cache_gib"] == pytest.approx(left, abs=4 * ROUNDING_GIB + 0.07)
    geometry = Geometry.from_config(start.settings.model.config or {})
    layout = kv_layout(geometry, start.row.kv_cache_dtype, rules_of(start.settings))
    length = start.settings.server.max_model_len
    pools = [
        layout.pool(int((gib["available_kv_cache_gib"] + away) * GIB), length).tokens
        for away in (-ROUNDING_GIB, ROUNDING_GIB)
    ]
    assert pools[0] <= (start.run.capacity.reported_tokens or 0) <= pools[1]


def test_every_memory_term_lies_in_the_planned_band(start: Start, gpu: Gpu) -> None:
    """On the profile's own card weights, activations, memory outside PyTorch and CUDA graphs lie in the planner's bands."""
    plain = card_settings(ROOT)
    logged = {term.name for term in start.run.reconciliation if term.reported_bytes is not None}
    assert logged == {"weights", "activation", "non_torch", "cuda_graphs"}, (
        "the sampler's state is in the consumed memory"
    )
    if abs(gpu.memory_visible_bytes - plain.device.memory_bytes) > CARD_TOLERANCE_BYTES:
        return  # overheads are one card's; the record still says what this one's are
    outside = {
        term.name: f"{(term.reported_bytes or 0) / GIB:.2f} of {term.low_bytes / GIB:.2f} to {term.high_bytes / GIB:.2f} GiB"
        for term in start.run.reconciliation
        if term.within is False
    }
    assert not outside, f"`quantgate calibrate` on {RECORDS} takes these into conf/overheads/: {outside}"


def test_scoring_gets_the_pool_that_was_measured(settings: Settings, folder: Path) -> None:
    """An engine that is given the measured pool in bytes has it to the token, with one sequence at a time as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        row, python = planned(settings, "bf16"), environment_python(on_device("serve", "cuda"))
        spec, tokens = dummy_spec(settings, "bf16", row), []
        for name, sequences in (("profiled", spec.max_num_seqs), ("given", 1)):
            wanted = replace(spec, max_num_seqs=sequences)
            with serve(wanted, python, folder / f"{name}.log", settings.server.startup_timeout_s) as server:
                metrics = parse_metrics(server.metrics_text())
            tokens.append(reported_capacity(parse_log(server.log_text()), metrics)[0])
            spec = replace(spec, kv_cache_memory_bytes=pool_bytes(row, metrics.num_gpu_blocks))
    assert tokens[0] == tokens[1]


@ONCE
def test_others_are_told_from_the_engine(start: Start) -> None:
    """Memory of other processes is known before and after the start, and none of it is the engine's."""
    [memory] = start.run.provenance.gpu_memory or []
    assert memory.held_before_bytes < 4 * GIB, "the card is in use: stop what runs on it"
    if memory.others_after is None:
        assert not memory.others_before, "the driver lists others, but our engine isn't under its pids"


@ONCE
def test_the_card_is_sampled_while_it_serves(start: Start) -> None:
    """Clocks, heat, power and utilization are in the timeline while requests run."""
    assert start.load is not None
    assert start.load.readings >= 3
    assert start.load.sm_clock_mhz is not None and start.load.power_mean_w is not None
    assert start.load.utilization_mean is None or start.load.utilization_mean > 0.1


def _head(settings: Settings) -> int:
    mixer = Geometry.from_config(settings.model.config or {}).layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer.head_dim
