"""The tests for a card, run over the recorded start-ups that show how one will be read, and the record on its way to calibrate.

What the engine writes is told here, not measured; the tests, the record and the fit are those that a card's owner runs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from pipeline.capacity import GIB
from pipeline.gpu import read_gpus
from pipeline.planning.calibrate import calibrate
from pipeline.planning.card import card_of
from pipeline.results import Gpu, GpuLoad, GpuMemory, save
from pipeline.serving.command import ServeSpec, build_command
from pipeline.serving.server import Server
from pipeline.serving.signals import parse_log
from pipeline.settings import Settings
from tests.gpu import test_start as gpu_tests
from tests.support.dummy_start import card_settings, dummy_spec, memory_run, planned, write_checkpoints
from tests.support.recorded_nvml import RecordedNvml, rtx_4090

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
VARIANTS = ("awq", "awq-fp8kv", "awq-kv-per-token-head", "awq-pinned")


@dataclass
class ToldServer:
    """A server that left this log behind."""

    spec: ServeSpec
    command: list[str]
    text: str
    gpus: tuple[Gpu, ...]
    gpu_memory: list[GpuMemory]
    log_path: Path = Path("serve.log")
    startup_s: float = 60.0

    def log_text(self) -> str:
        return self.text

    def metrics_text(self) -> str:
        signals = parse_log(self.text)
        labels = f'kv_cache_size_tokens="{signals.kv_cache_tokens}",kv_cache_max_concurrency="{signals.max_concurrency}"'
        return f"vllm:cache_config_info{{{labels}}} 1.0\n"


@pytest.fixture(scope="module")
def settings() -> Settings:
    return card_settings(ROOT)


@pytest.fixture(scope="module")
def card() -> Gpu:
    return read_gpus(RecordedNvml(rtx_4090()))[0]


def started(
    name: str, settings: Settings, card: Gpu, folder: Path, patch: pytest.MonkeyPatch, text: str | None = None
) -> gpu_tests.Start:
    write_checkpoints(settings, folder)
    patch.chdir(folder)
    row = planned(settings, name)
    memory = GpuMemory(
        uuid=card.uuid, name=card.name, visible_bytes=card.memory_visible_bytes, held_before_bytes=2 * 2**20,
        others_before=[], others_after=[], changed_bytes=0,
    )  # fmt: skip
    spec = dummy_spec(settings, name, row)
    log = text or (RECORDED / f"log-0.32-rtx4090-{name}.txt").read_text(encoding="utf-8")
    server = ToldServer(spec, build_command(spec, "python", 8000), log, (card,), [memory])
    run = memory_run(settings, name, row, cast(Server, server))
    load = GpuLoad(
        uuid=card.uuid, name=card.name, readings=9, sm_clock_mhz=(2_500, 2_600.0, 2_700), memory_clock_mhz=None,
        temperature_max_c=60, power_mean_w=300.0, power_max_w=350.0, power_limit_w=450.0, utilization_mean=0.9, slowed={},
        power_capped=0.0,
    )  # fmt: skip
    return gpu_tests.Start(settings, row, run, parse_log(log).memory_gib, load, server.command)


CHECKS = (
    gpu_tests.test_cuda_graphs_are_captured,
    gpu_tests.test_the_pool_is_the_arithmetic_of_the_reported_terms,
    gpu_tests.test_others_are_told_from_the_engine,
    gpu_tests.test_the_card_is_sampled_while_it_serves,
)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_start_as_planned_passes_the_cards_tests(
    name: str, settings: Settings, card: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = started(name, settings, card, tmp_path, monkeypatch)
    for check in CHECKS:
        check(start)
    gpu_tests.test_kernels_are_those_that_the_tables_name(start, card)
    gpu_tests.test_every_memory_term_lies_in_the_planned_band(start, card)


@pytest.mark.parametrize(
    ("old", "new", "failing"),
    [
        ("0.62 GiB for peak activation", "2.62 GiB for peak activation", "the_pool_is_the_arithmetic"),
        ("291,280 tokens", "288,000 tokens", "the_pool_is_the_arithmetic"),
        ("for CUDAGraph memory", "for something else", "cuda_graphs_are_captured"),
        ("Using FLASH_ATTN attention", "Using FLEX_ATTENTION attention", "kernels"),
        ("Using MarlinLinearKernel", "Using ConchLinearKernel", "kernels"),
        ("5.57 GiB for consumed", "6.57 GiB for consumed", "every_memory_term"),
    ],
)
def test_another_start_fails_them(
    old: str,
    new: str,
    failing: str,
    settings: Settings,
    card: Gpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (RECORDED / "log-0.32-rtx4090-awq.txt").read_text(encoding="utf-8")
    assert old in text
    text = text.replace(old, new)
    if failing == "cuda_graphs_are_captured":  # nothing of graphs at all
        text = "".join(line for line in text.splitlines(keepends=True) if "CUDA graph" not in line)
    start = started("awq", settings, card, tmp_path, monkeypatch, text)
    with pytest.raises((AssertionError, KeyError)):
        if failing == "kernels":
            gpu_tests.test_kernels_are_those_that_the_tables_name(start, card)
        elif failing == "every_memory_term":
            gpu_tests.test_every_memory_term_lies_in_the_planned_band(start, card)
        elif failing == "cuda_graphs_are_captured":
            gpu_tests.test_cuda_graphs_are_captured(start)
        else:
            gpu_tests.test_the_pool_is_the_arithmetic_of_the_reported_terms(start)


def test_the_records_become_the_cards_overheads(
    settings: Settings, card: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "conf", root / "conf")
    files = []
    for name in VARIANTS:
        start = started(name, settings, card, tmp_path / name, monkeypatch)
        files.append(save(tmp_path / "records" / f"{name}.json", start.run))
    path, text = calibrate(settings, files, root)
    again = card_settings(root, f"overheads={path.stem}")
    runs: dict[str, list[int]] = {}
    for row in again.overheads.for_version("0.32.0"):
        runs.setdefault(row.name, []).append(row.runs)
    # Graphs differ by attention backend: two of the variants run on FlashInfer.
    assert runs == {"buffers": [4], "activation": [4], "non_torch": [4], "cuda_graphs": [2, 2]}
    for name in VARIANTS:
        computed = card_of(settings, settings.variants[name]).overheads
        measured = card_of(again, again.variants[name]).overheads
        for before, after in zip(computed, measured, strict=True):
            # The logs are told with the computed overheads, so those come back, to the log's two digits.
            assert after.value_bytes == pytest.approx(before.value_bytes, abs=GIB // 80), text
            assert after.certain
