"""Where the time went, as rows, as the terminal's lines, on the page and in MLflow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.report import render
from pipeline.report.terminal import time_table
from pipeline.report.times import last_run, stage_rows
from pipeline.results import StageTime
from pipeline.tracking.content import variant_content
from tests.support.sample_results import SHAPES, sample_results


def test_rows_follow_the_graph_and_a_kept_stage_is_told_from_one_that_ran() -> None:
    rows = stage_rows(sample_results())
    assert [row.stage for row in rows] == [
        "environment", "prepare", "quantize@awq", "quantize@awq-lc", "plan",
        *(f"{stage}@{name}" for stage in ("measure", "quality") for name in SHAPES),
    ]  # fmt: skip
    # awq-lc left a record and no time: nothing says that it ran now.
    assert [row.stage for row in rows if row.kept] == ["prepare", "quantize@awq-lc"]
    for row in rows:
        assert sum(phase.seconds for phase in row.phases) <= row.seconds


def test_the_last_run_is_from_its_first_stage_to_its_last() -> None:
    bundle = sample_results()
    whole = last_run(bundle)
    ran = [found.wall_s for found in bundle.times.values() if found.stage != "prepare"]
    assert whole is not None
    assert whole.in_stages_s == sum(ran)
    assert whole.seconds == pytest.approx(sum(ran) + 1.5 * (len(ran) - 1))


def test_the_terminal_says_it_in_a_line_a_stage() -> None:
    text = time_table(sample_results())
    assert text.startswith("Where the time went: 21 min 56 s, 21 min 38 s of it in stages\n")
    assert text.endswith("k: DVC kept the results; the time is that of the run that made them\n")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()[2:-2]}
    assert lines["measure@awq"] == "129 s engine start 24, fill 10, levels 40, closed search 51, shutdown 2"
    assert lines["quality@bf16"] == "97 s engine start 25, team_demo 52, divergence 15, shutdown 2"
    assert lines["quantize@awq"] == "136 s quantization 96, proof 40"
    assert lines["prepare"] == "24 s k"
    assert max(map(len, text.splitlines())) <= 110


def test_results_without_times_say_nothing_false() -> None:
    bundle = replace(sample_results(), times={})
    assert last_run(bundle) is None
    assert not any(row.kept for row in stage_rows(bundle))
    nothing = replace(bundle, measurements={}, qualities={}, quantizations={})
    assert stage_rows(nothing) == [] and time_table(nothing) == ""
    assert "Where the time went" not in render(nothing)[0]


def test_page_and_markdown_have_every_stage_and_phase() -> None:
    page, markdown = render(sample_results())
    assert "measure@awq: closed search 51.0 s" in page and "quality@bf16: team_demo 52.3 s" in page
    assert "quantize@awq: proof 40.0 s" in page and "from an earlier run" in page
    assert "engine start 24, fill 10, levels 40, closed search 51, shutdown 2" in markdown


def test_a_variants_run_has_its_phases() -> None:
    metrics = {point.key: point.value for point in variant_content(sample_results(), "awq").metrics}
    assert metrics["time/measure_engine_start_s"] == 24.0
    assert metrics["time/measure_closed_search_s"] == 51.0
    assert metrics["time/quality_team_demo_s"] == 52.3
    without = variant_content(sample_results(frozenset({"awq"})), "awq")
    assert not any(point.key.startswith("time/") for point in without.metrics)


def test_a_stage_that_ran_later_is_part_of_the_run() -> None:
    bundle = sample_results()
    late = max(found.started_at for found in bundle.times.values())
    track = StageTime(stage="track", started_at=late, wall_s=500.0)
    longer = last_run(replace(bundle, times={**bundle.times, "track": track}))
    shorter = last_run(bundle)
    assert longer is not None and shorter is not None
    assert longer.seconds == pytest.approx(shorter.seconds + 400.0)
