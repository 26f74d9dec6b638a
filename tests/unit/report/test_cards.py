"""The report and MLflow of runs on a card: throttling and moved memory are said first, and a CPU shows none of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.report import render
from pipeline.report.bundle import ResultBundle
from pipeline.report.cards import CHANGE_LIMIT_BYTES, cards_table
from pipeline.report.reading import warnings
from pipeline.report.sections.provenance import engine_table
from pipeline.report.wording import NOT_MEASURED
from pipeline.results import GpuLoad, GpuMemory, GpuProcess
from pipeline.tracking.content import variant_content
from tests.support.sample_results import sample_results

pytestmark = pytest.mark.usefixtures("without_plots")
UUID, NAME = "GPU-1", "NVIDIA GeForce RTX 4090"


def load(**changes: Any) -> GpuLoad:
    values: dict[str, Any] = {
        "uuid": UUID, "name": NAME, "readings": 120, "sm_clock_mhz": (2_480, 2_590.5, 2_730),
        "memory_clock_mhz": (10_251, 10_251.0, 10_251), "temperature_max_c": 71, "power_mean_w": 402.2,
        "power_max_w": 449.0, "power_limit_w": 450.0, "utilization_mean": 0.98, "slowed": {}, "power_capped": 0.31,
    }  # fmt: skip
    return GpuLoad(**{**values, **changes})


def memory(changed: int | None = 0) -> GpuMemory:
    others = [GpuProcess(pid=7, name="Xorg", memory_bytes=412 * 1024**2)]
    return GpuMemory(
        uuid=UUID, name=NAME, visible_bytes=24_210 * 1024**2, held_before_bytes=414 * 1024**2, others_before=others,
        others_after=others, changed_bytes=changed,
    )  # fmt: skip


def on_a_card(**provenance: Any) -> ResultBundle:
    """The sample with the variant awq measured on a card."""
    bundle = sample_results()
    result = bundle.verdict.variants["awq"]
    assert result.provenance is not None
    changed = result.model_copy(update={"provenance": result.provenance.model_copy(update=provenance)})
    variants = {**bundle.verdict.variants, "awq": changed}
    return replace(bundle, verdict=bundle.verdict.model_copy(update={"variants": variants}))


def titles(bundle: ResultBundle) -> list[str]:
    return [title for title, _ in warnings(bundle)]


def test_a_cpu_shows_no_card_anywhere() -> None:
    bundle = sample_results()
    assert cards_table(bundle) is None
    run = variant_content(bundle, "awq")
    assert not any(point.key.startswith("gpu/") for point in run.metrics)
    assert not any(key.startswith("gpu") for key in run.tags)
    assert "Cards under load" not in render(bundle)[0]


def test_an_undisturbed_card_is_a_row_and_no_warning() -> None:
    bundle = on_a_card(gpu_load=[load()], gpu_memory=[memory()])
    assert titles(bundle) == titles(sample_results())
    table = cards_table(bundle)
    assert table is not None
    [row] = table.rows
    assert [cell.text for cell in row] == [
        "awq", NAME, "2,590", "71", "402", "98.0\u00a0%", "31.0\u00a0%", "no", "414.0 MiB", "none",
    ]  # fmt: skip
    assert row[2].note == "2,480 to 2,730"
    html, markdown = render(bundle)
    assert "Cards under load" in html and "Cards under load" in markdown
    run = variant_content(bundle, "awq")
    assert run.tags["gpu_slowed"] == "no" and run.tags["gpu_memory_moved"] == "no"
    points = {point.key: point.value for point in run.metrics}
    assert points["gpu/sm_clock_min_mhz"] == 2_480
    assert points["gpu/slowed_share"] == 0.0


def test_throttling_is_flagged_in_report_and_mlflow() -> None:
    bundle = on_a_card(gpu_load=[load(slowed={"heat": 0.25})], gpu_memory=[memory()])
    assert "The card was slowed down" in titles(bundle)
    html, _ = render(bundle)
    assert "awq (NVIDIA GeForce RTX 4090: heat 25.0" in html
    run = variant_content(bundle, "awq")
    assert run.tags["gpu_slowed"] == "yes"
    assert {point.key: point.value for point in run.metrics}["gpu/slowed_share"] == 0.25


def test_memory_moved_by_others_is_flagged_from_a_limit_on() -> None:
    at_the_limit = on_a_card(gpu_memory=[memory(CHANGE_LIMIT_BYTES)])
    assert "Others moved memory on the card" not in titles(at_the_limit)
    for change, sign in ((CHANGE_LIMIT_BYTES + 2**20, "+"), (-CHANGE_LIMIT_BYTES - 2**20, "−")):
        bundle = on_a_card(gpu_memory=[memory(change)])
        assert "Others moved memory on the card" in titles(bundle)
        assert f"awq ({sign}65.0 MiB by Xorg)" in render(bundle)[0]
        assert variant_content(bundle, "awq").tags["gpu_memory_moved"] == "yes"


def test_what_is_not_known_is_said_so_and_left_out_of_mlflow() -> None:
    blind = load(
        readings=0, sm_clock_mhz=None, memory_clock_mhz=None, temperature_max_c=None, power_mean_w=None, power_max_w=None,
        power_limit_w=None, utilization_mean=None, slowed=None, power_capped=None,
    )  # fmt: skip
    bundle = on_a_card(gpu_load=[blind], gpu_memory=[memory(None)])
    table = cards_table(bundle)
    assert table is not None
    [row] = table.rows
    assert [cell.kind for cell in row[2:8]] == ["missing"] * 6
    assert row[9].kind == "missing"
    run = variant_content(bundle, "awq")
    assert not {"gpu_slowed", "gpu_memory_moved"} & set(run.tags)
    assert {point.key for point in run.metrics if point.key.startswith("gpu/")} == {
        "gpu/held_by_others_bytes"
    }


def test_a_cards_sampler_and_compilers_are_said_and_a_cpus_are_empty() -> None:
    compilers = "triton 3.7.1, flashinfer-python 0.7.0.post1, nvidia-cuda-nvcc 13.0.88"
    bundle = on_a_card(gpu=NAME, sampler="vllm", compiled_with=compilers)
    rows = {row[0].text: row[1:] for row in engine_table(bundle).rows}
    place = bundle.variants.index("awq")
    assert rows["Compiled at the start by"][place].text == compilers
    assert rows["Sampler"][place].text.startswith("vLLM's own for top-k and top-p")
    for label in ("Sampler", "Compiled at the start by"):
        assert {cell.text for index, cell in enumerate(rows[label]) if index != place} == {""}
    silent = {row[0].text: row[1:] for row in engine_table(on_a_card(gpu=NAME)).rows}
    assert silent["Sampler"][place].text == silent["Compiled at the start by"][place].text == NOT_MEASURED
