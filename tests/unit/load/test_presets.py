"""The shipped loads and SLOs: they compose, can decide what they promise, and stand together with their profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.load.judge import boundary
from pipeline.load.measure import LoadOutcome
from pipeline.load.records import read_records
from pipeline.load.slo import search_plans, slo_of
from pipeline.settings import load_settings
from pipeline.stages.measure import _keep_unfinished, load_plan
from tests.support.load_records import record
from tests.support.load_results import fill_test, probe
from tests.unit.load.test_fill import capacity

ROOT = Path(__file__).resolve().parents[3]
LOADS = {path.stem for path in (ROOT / "conf/load").glob("*.yaml")}
CPU_LOADS = {"demo", "demo-full"}


@pytest.mark.parametrize(
    ("name", "ttft_ms", "tpot_ms"),
    [("mlperf-llama3.1-8b", 2000, 100), ("mlperf-llama3.1-8b-interactive", 500, 30)],
)
def test_mlperf_limits(name: str, ttft_ms: float, tpot_ms: float) -> None:
    """MLPerf Inference, Llama-3.1-8B, server and interactive scenario: both at p99."""
    slo = load_settings(["profile=rtx4090", f"slo={name}"], ROOT).slo
    assert (slo.ttft_ms, slo.tpot_ms, slo.percentile, slo.confidence) == (ttft_ms, tpot_ms, 0.99, 0.99)


@pytest.mark.parametrize("load", sorted(LOADS))
def test_every_shipped_load_can_decide_its_profiles_slo(load: str) -> None:
    """A probe of `max_requests` can pass: with none over, before its last request."""
    profile = "demo" if load in CPU_LOADS else "rtx4090"
    settings = load_settings([f"profile={profile}", f"load={load}"], ROOT)
    slo = slo_of(settings)
    plans = search_plans(settings)
    assert plans
    for plan, until_s in plans:
        line = boundary(slo.percentile, slo.confidence, plan.max_requests)
        assert 0 in line.pass_at
        assert until_s > 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = {chr(0x4E00 + number): number for number in range(3000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return tmp_path


def test_the_demos_plan_holds_the_control_and_the_fill_test(model: Path) -> None:
    """Eight streams of one block fit the BF16 pool of 34 usable blocks, 40 don't: control and saturation."""
    settings = load_settings(["load=demo"], ROOT)
    plan = load_plan(settings, model, capacity())(reported_tokens=4480)
    assert plan.fill is not None and plan.fill_source is not None
    assert (plan.fill.predicted_running, plan.fill.offered) == (8, 12)
    assert [search.mode for search, _ in plan.searches] == ["closed"]
    longest = settings.load.workload.longest_tokens
    assert longest is not None and longest <= settings.server.block_size  # one block each
    assert 8 in plan.levels and max(plan.levels) > 34
    requests = plan.source.requests("level-40", 80)
    assert {len(request.prompt) + request.output_tokens for request in requests} == {longest}


def test_what_cannot_be_judged_or_sent_is_said_before_an_engine_starts(model: Path) -> None:
    few = load_settings(["load.search.max_requests=5"], ROOT)
    with pytest.raises(UserInputError, match=r"max_requests is 5; p80 at 90% confidence .* fewer than 11"):
        load_plan(few, model, capacity())
    team = load_settings(["load=team-prompts", "load.workload.file=nowhere.jsonl"], ROOT)
    with pytest.raises(UserInputError, match=r"nowhere\.jsonl: no such file"):
        load_plan(team, model, capacity())


def test_what_was_finished_before_the_engine_died_is_kept_in_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = LoadOutcome(records=[record(0, 1.0, 0.1, 0.1)], probes=[probe(4)], fill=fill_test())
    _keep_unfinished(tmp_path, "awq", outcome, EngineFailedError("the server of awq died: out of memory"))
    kept = json.loads((tmp_path / "unfinished.json").read_text())
    assert kept["cause"] == "the server of awq died: out of memory"
    assert [item["load"] for item in kept["probes"]] == [4]
    assert kept["fill"]["observed_peak_running"] == 8
    assert read_records(tmp_path / "unfinished.requests.parquet") == outcome.records
    assert "0 levels and 1 probes were finished" in capsys.readouterr().err
