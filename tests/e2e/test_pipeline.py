"""The whole graph on the real engine: a reduced demo in a temporary clone, cached, rerun in part, and killed.

One story in the order of a user's day, because each step needs the results of the one before: run it, run it again,
edit one variant, kill it in the middle, run it once more.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from pipeline.environments.build import environment_folder
from pipeline.load.fill import fill_result, plan_fill
from pipeline.load.metrics import summarise
from pipeline.load.records import RequestRecord, read_records
from pipeline.load.slo import probe_result, search_plans, slo_of
from pipeline.results import Measurement, PlanRow, Verdict, load
from pipeline.settings import load_settings
from tests.support.patience import ENGINE_START_S, wait_until, wait_until_empty
from tests.support.processes import alive
from tests.support.tree import copy_tree

VARIANTS = ["bf16", "awq-fp8kv"]
LEVELS = [2, 12]
HANGS_S = 5400.0  # so long no run takes on any machine that can finish the tests
OWN = "runs/reduced/dvc.yaml:"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as a clone would have it, pointed at a reduced profile."""
    folder = copy_tree(tmp_path_factory.mktemp("clone") / "quantgate")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    conf = folder / "conf"
    reduced = yaml.safe_load((conf / "load/demo.yaml").read_text()) | {"levels": LEVELS, "min_requests": 7}
    reduced["search"] |= {"until_s": 60, "maximum": 16}
    (conf / "load/reduced.yaml").write_text(yaml.safe_dump(reduced))
    items = yaml.safe_load((conf / "evalset/team-demo.yaml").read_text()) | {
        "items": 40,
        "slice_items": {"long_context": 2},
        "divergence": {"prompts": 10, "continuation_tokens": 4, "top_k": 20},
        "further": [{"task": "team_demo_short", "chat_template": True, "metric": "exact_match", "items": 10}],
    }
    (conf / "evalset/reduced.yaml").write_text(yaml.safe_dump(items))
    profile = (conf / "profile/demo.yaml").read_text()
    profile = profile.replace("override /load: demo", "override /load: reduced")
    profile = profile.replace("override /evalset: team-demo", "override /evalset: reduced")
    profile = profile.replace("profile: demo", "profile: reduced").replace(
        "control: bf16-again", "control: null"
    )
    profile = re.sub(r"variant_names: .*", f"variant_names: {VARIANTS}", profile)
    (conf / "profile/reduced.yaml").write_text(profile)
    _quantgate(folder, "use", "reduced")
    return folder


def _quantgate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    python = environment_folder("orchestrator") / "bin" / "python"
    return subprocess.run(
        [python, "-m", "pipeline.cli", *words], cwd=folder, check=True, text=True, capture_output=True
    )


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [environment_folder("orchestrator") / "bin" / "dvc", "repro"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _repro(folder: Path) -> set[str]:
    """Run `dvc repro`; which stages ran."""
    process = _start(folder)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, output[-6000:]
    return set(re.findall(r"Running stage '([^']+)'", output))


def _left_over(folder: Path, known: Sequence[psutil.Process] = ()) -> list[str]:
    """Live processes that work in or for the clone, and those of `known`: the engine's hide what they were started with."""
    found = [f"{process.pid} known" for process in alive(known)]
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        if process.pid == os.getpid():
            continue
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words or str(folder) in (process.info["cwd"] or ""):
            found.append(f"{process.pid} {words[:120]}")
    return found


@pytest.fixture(scope="module")
def first_run(clone: Path) -> Iterator[set[str]]:
    yield _repro(clone)


def test_every_stage_ran(first_run: set[str]) -> None:
    expected = {"environment", "track"}
    expected |= {f"{OWN}{stage}" for stage in ("prepare", "quantize@awq", "plan", "verdict", "report")}
    expected |= {f"{OWN}{stage}@{variant}" for stage in ("measure", "quality") for variant in VARIANTS}
    assert first_run == expected


def test_verdict_keeps_its_contract(clone: Path, first_run: set[str]) -> None:
    raw = json.loads((clone / "results/verdict.json").read_text())
    assert {"profile", "reference", "variants"} <= set(raw)
    for name in VARIANTS:
        variant = raw["variants"][name]
        assert variant["decision"] in ("GO", "NO-GO", "INCONCLUSIVE")
        for gate in variant["gates"]:
            assert {"name", "decision", "value", "limit", "unit", "why"} <= set(gate)
        assert variant["capacity"]["predicted_tokens"] == variant["capacity"]["reported_tokens"] > 0
        assert variant["quality"]["n"] == 40
        assert variant["provenance"]["engine_version"]
    quantized = raw["variants"]["awq-fp8kv"]
    assert quantized["divergence"]["prompts"] == 10 and quantized["divergence"]["kl"]["value"] > 0
    assert quantized["further"]["team_demo_short"]["n"] == 10
    assert "quality-team_demo_short" in {gate["name"] for gate in quantized["gates"]}
    # 40 sequences are wanted, and 8 of the reference's fit: arithmetic and engine agree on that NO-GO.
    assert raw["variants"]["bf16"]["decision"] == "NO-GO"
    load(clone / "results/verdict.json", Verdict)


def test_fp8_kv_and_awq_raise_capacity_as_predicted(clone: Path, first_run: set[str]) -> None:
    small, large = (load(clone / f"results/measure/{name}.json", Measurement) for name in VARIANTS)
    assert large.capacity.predicted_fitting_sequences > 40 > small.capacity.predicted_fitting_sequences
    assert small.capacity.observed_peak_running is not None
    assert abs(small.capacity.observed_peak_running - small.capacity.predicted_fitting_sequences) <= 1
    assert large.provenance.kv_cache_dtype is not None and "fp8" in large.provenance.kv_cache_dtype


def test_fill_test_agrees_with_the_planner(clone: Path, first_run: set[str]) -> None:
    """Within one sequence, or the result says why: here nothing else holds requests back, so it must agree."""
    for name in VARIANTS:
        fill = load(clone / f"results/measure/{name}.json", Measurement).fill
        assert fill is not None
        assert fill.agrees, fill.note
        assert (fill.waiting_at_peak or 0) >= 1
        assert (fill.observed_peak_kv_usage or 0) > 0.85


def test_search_answers_with_an_interval(clone: Path, first_run: set[str]) -> None:
    for name in VARIANTS:
        (search,) = load(clone / f"results/measure/{name}.json", Measurement).searches
        assert search.probes and search.requests == sum(probe.requests for probe in search.probes)
        assert search.low is None or search.high is None or search.low <= search.high
        assert all(probe.decision == "undecided" for probe in search.probes if probe.client_saturated)


def test_published_figures_come_from_the_records(clone: Path, first_run: set[str]) -> None:
    """Levels, fill test and probes, from the files alone and from the settings that the run had."""
    settings = load_settings(["profile=reduced"], clone)
    slo, plans = slo_of(settings), {plan.mode: plan for plan, _ in search_plans(settings)}
    server = settings.server
    for name in VARIANTS:
        measured = load(clone / f"results/measure/{name}.json", Measurement)
        records = read_records(clone / measured.requests_file)
        timeline = [json.loads(line) for line in (clone / measured.timeline_file).read_text().splitlines()]
        cells: dict[str, list[RequestRecord]] = {}
        for record in records:
            cells.setdefault(record.cell, []).append(record)
        for level in measured.levels:
            share = level.client_cpu_share
            assert summarise(cells.pop(level.cell), timeline, slo.limits, client_cpu_share=share) == level
        for search in measured.searches:
            for probe in search.probes:
                own = cells.pop(probe.cell)
                again = probe_result(own, probe.load, slo, plans[search.mode], probe.client_cpu_share)
                assert again == probe
        row = load(clone / f"results/plan/{name}.json", PlanRow)
        fill = plan_fill(row.capacity, 4, server.max_num_seqs, server.max_num_batched_tokens)
        tokens = measured.capacity.reported_tokens
        assert tokens is not None
        assert fill_result(fill, row.capacity, tokens, cells.pop("fill"), timeline) == measured.fill
        assert cells == {}  # and there is no record that nothing was published from


def test_report_and_tracking_are_there(clone: Path, first_run: set[str]) -> None:
    import mlflow

    html = (clone / "results/report.html").read_text()
    assert all(name in html for name in VARIANTS)
    tracked = json.loads((clone / "results/tracking.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{clone}/mlruns/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == tracked["experiment"]]
    assert len(client.search_runs([experiment.experiment_id])) == len(VARIANTS) + 1


def test_nothing_changed_nothing_runs(clone: Path, first_run: set[str]) -> None:
    """What an eval set's results don't depend on doesn't count as a change."""
    for name in ("README.md", "team-demo/README.md", "team-demo/facts/chinese.txt"):
        path = clone / "evalsets" / name
        path.write_text(path.read_text() + "\n# One more line.\n")
    assert _repro(clone) == {"environment"}


def test_killed_in_measure_then_run_again(clone: Path, first_run: set[str]) -> None:
    """Edit one variant, SIGKILL dvc while its engine serves: nothing stays behind, the next run reruns that variant only."""
    path = clone / "conf/variant/awq-fp8kv.yaml"
    path.write_text(path.read_text() + "engine_args: [--max-logprobs, '25']\n")
    before = (clone / "results/measure/bf16.json").read_bytes()
    log = clone / "results/logs/measure/awq-fp8kv/serve.log"
    log.unlink(missing_ok=True)
    process = _start(clone)

    def serves() -> bool:
        assert process.poll() is None, "dvc ended before its engine was ready"
        return log.exists() and "Application startup complete" in log.read_text(errors="replace")

    wait_until(serves, ENGINE_START_S)
    known = psutil.Process(process.pid).children(recursive=True)
    assert len(known) > 3, "the stage, its guard, the engine's processes"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_empty(lambda: _left_over(clone, known))
    assert (clone / "results/measure/bf16.json").read_bytes() == before
    assert not list((clone / "results").rglob("*.partial"))
    ran = _repro(clone)
    # The plan isn't among them: it was made again before the kill, and what it says of other variants is the same.
    assert ran == {
        "environment",
        f"{OWN}measure@awq-fp8kv",
        f"{OWN}quality@awq-fp8kv",
        f"{OWN}verdict",
        f"{OWN}report",
        "track",
    }
    wait_until_empty(lambda: _left_over(clone))


def test_wrong_input_stops_before_anything_runs(clone: Path, first_run: set[str]) -> None:
    path = clone / "conf/variant/awq-fp8kv.yaml"
    good = path.read_text()
    verdict = (clone / "results/verdict.json").read_bytes()
    try:
        path.write_text(good.replace("kv_cache_dtype: fp8", "kv_cache_dtype: fp9"))
        process = _start(clone)
        output, _ = process.communicate(timeout=HANGS_S)
    finally:
        path.write_text(good)
    assert process.returncode != 0
    assert "conf/variant/awq-fp8kv.yaml: kv_cache_dtype is 'fp9'" in output
    assert "Traceback" not in output
    assert (clone / "results/verdict.json").read_bytes() == verdict
