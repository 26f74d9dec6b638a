"""How long it takes: the roofline against a published sweep, the profile's afternoon, and README's tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.doctor.scenario import check_time
from pipeline.errors import UserInputError
from pipeline.load.judge import boundary
from pipeline.load.metrics import Limits
from pipeline.load.slo import Slo, search_plans
from pipeline.planning.card import card_of
from pipeline.planning.load_time import _search_to_s, lengths_of
from pipeline.planning.render_time import duration, headline, markdown
from pipeline.planning.roofline import Lengths, Roofline
from pipeline.planning.scenario import geometry_of, row_of
from pipeline.planning.scoring_lengths import scored_tasks
from pipeline.planning.timing import ProfileTime, engine_of, guarded_time, profile_time
from pipeline.settings import Settings, load_settings
from pipeline.settings.schema import LocalSource, TaskSettings
from tests.support.slo_trials import run_search, seen_at_levels

ROOT = Path(__file__).parents[3]
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def rtx4090() -> Settings:
    return load_settings(["profile=rtx4090"], ROOT)


@pytest.fixture(scope="module")
def expected(rtx4090: Settings) -> ProfileTime:
    found = profile_time(rtx4090)
    assert found is not None
    return found


def changed(*overrides: str) -> ProfileTime:
    found = profile_time(load_settings(["profile=rtx4090", *overrides], ROOT))
    assert found is not None
    return found


@pytest.mark.parametrize(("streams", "seen_rps"), [(4, 2.09), (8, 3.78), (16, 6.44), (32, 9.73), (48, 11.87)])
def test_a_published_sweep_on_this_card_is_met(streams: int, seen_rps: float) -> None:
    """Mistral-7B-Instruct-v0.3 on an RTX 4090, vLLM: 300 requests of 256 prompt and 100 generated tokens (mushfiqrahman.dev,
    "Benchmarking Mistral-7B on RTX 4090 (vLLM)"). 7.25e9 parameters, 32 layers, 32 heads and 8 KV heads of 128."""
    read = 7.248e9 - 32_768 * 4096  # without the input embeddings
    engine = Roofline(2 * read, 2 * read, 4 * 32 * 4096, 131_072, 50_000, 1008e9, 165.2e12)
    found_rps = 300 / engine.drained_s(300, streams, Lengths.of([256], [100]))
    assert found_rps == pytest.approx(seen_rps, rel=0.01)


def test_a_published_offline_run_is_met_on_the_fast_side(rtx4090: Settings) -> None:
    """DeepSeek-R1-Distill-Qwen-7B, this profile's geometry, 300 requests of 100 + 600 tokens at once: 5.96 requests/s
    (databasemart.com, "RTX4090 vLLM Benchmark"; vLLM's 256 sequences at a time, so that the last 44 run nearly alone)."""
    geometry, bf16 = geometry_of(rtx4090), rtx4090.variants["bf16"]
    engine = engine_of(rtx4090, geometry, row_of(rtx4090, bf16, geometry, card_of(rtx4090, bf16)))
    found_rps = 300 / engine.drained_s(300, 256, Lengths.of([100], [600]))
    assert 5.96 < found_rps < 5.96 * 1.25


def test_steps_are_bound_by_bytes_and_then_by_arithmetic() -> None:
    engine = Roofline(14e9, 14e9, 0, 57_344, 1e6, 1e12, 100e12)
    assert engine.step_s(1, 0) == engine.step_s(50, 0)  # 14 GB take 15.6 ms, 50 tokens 14 ms
    assert engine.step_s(100, 0) == pytest.approx(0.028 + 0.0015)
    assert engine.step_s(1, 1e5) - engine.step_s(1, 0) == pytest.approx(1e5 * 57_344 / 0.9e12)
    assert replace(engine, pool_tokens=1000).running(60, 100) == 10


def test_the_shipped_profile_is_an_afternoon(rtx4090: Settings, expected: ProfileTime) -> None:
    assert expected.total_s <= 5 * HOUR_S
    assert [one.variant for one in expected.variants] == list(rtx4090.variants)
    assert set(expected.quantize_s) == set(rtx4090.quantizers)
    # No variant is cut off by the search's time limit, wherever its limit is.
    assert rtx4090.load.search is not None
    assert all(one.load.total_s < rtx4090.load.search.until_s for one in expected.variants)


def test_readmes_tables_are_what_the_function_prints(expected: ProfileTime) -> None:
    """Print them anew with `python -m pipeline.planning.render_time profile=rtx4090`."""
    assert markdown(expected) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_drives_it_moves_it(rtx4090: Settings, expected: ProfileTime) -> None:
    fewer = changed("load.repeats=1", "evalset.divergence=null")
    one, other = expected.variants[0], fewer.variants[0]
    assert other.load.levels_s == pytest.approx(one.load.levels_s / 3)
    assert other.stream_s == 0 < one.stream_s
    model = rtx4090.model.model_copy(update={"source": LocalSource(path="/models/x")})
    local = profile_time(rtx4090.model_copy(update={"model": model}))
    assert local is not None
    assert expected.prepare_s - local.prepare_s == pytest.approx(15.23e9 / 12.5e6, rel=0.01)
    slower = changed("device.dense_16bit_tflops=82.6", "device.memory_bandwidth_gb_s=504")
    assert 1.8 < slower.variants[0].load.levels_s / one.load.levels_s < 2.1
    times = {one.variant: one for one in expected.variants}
    assert times["awq"].load.levels_s < times["bf16"].load.levels_s  # fewer bytes a step
    assert times["awq-fp8kv"].load.fill_s > times["awq"].load.fill_s  # more sequences to fill the pool with


def test_scoring_one_sequence_at_a_time_takes_hours(expected: ProfileTime) -> None:
    serial = changed("evalset.batching=serial")
    assert serial.quality_s > 2 * expected.quality_s
    assert serial.measure_s == expected.measure_s


def test_a_sequential_run_is_shorter_for_all_but_reference_and_control(rtx4090: Settings) -> None:
    fixed = changed("evalset.looks=1")
    looking = changed("evalset.looks=8", "policy.quality_margin=0.03")
    before = {one.variant: one.tasks_s["team_demo"] for one in fixed.variants}
    after = {one.variant: one.tasks_s["team_demo"] for one in looking.variants}
    for name, whole in before.items():
        if name in (rtx4090.reference, rtx4090.control):
            assert after[name] == whole
        else:
            assert 0.3 * whole < after[name] < 0.7 * whole  # README: half of the items


def test_tasks_are_counted_from_their_files(rtx4090: Settings) -> None:
    tasks = {task.task: task for task in scored_tasks(rtx4090.evalset)}
    assert (tasks["team_demo"].items, tasks["team_demo"].requests) == (962, 3848)
    assert tasks["team_demo_short"].lengths.answer == 12  # its yaml's max_gen_toks
    assert (tasks["mmlu_pro"].items, tasks["ceval-valid"].requests) == (14 * 24, 52 * 6 * 4)
    assert tasks["gsm8k_cot"].items == 300
    unknown = TaskSettings(task="hellaswag", from_hub=True, metric="acc")
    evalset = rtx4090.evalset.model_copy(update={"further": (unknown,)})
    with pytest.raises(UserInputError, match="lengths of lm-eval's task hellaswag aren't known"):
        scored_tasks(evalset)
    time, why = guarded_time(rtx4090.model_copy(update={"evalset": evalset}))
    assert time is None and why.startswith("not estimated: the lengths of lm-eval's task hellaswag")


def test_lengths_of_every_workload(tmp_path: Path) -> None:
    chats = lengths_of(load_settings(["profile=rtx4090"], ROOT).load.workload)
    assert 800 < chats.prompt < 880 and 230 < chats.answer < 260  # exp(sigma^2 / 2) times the median, cut
    assert chats.context > chats.prompt + chats.answer / 2
    shared = load_settings(["profile=rtx4090", "load=shared-prefix"], ROOT).load.workload
    assert (lengths_of(shared).prompt, lengths_of(shared).answer) == (2304, 256)
    path = tmp_path / "team.jsonl"
    path.write_text(json.dumps({"prompt": "four" * 100, "output_tokens": 7}))
    own = load_settings(["profile=rtx4090", "load=team-prompts", f"load.workload.file={path}"], ROOT)
    assert (lengths_of(own.load.workload).prompt, lengths_of(own.load.workload).answer) == (100, 7)


@pytest.mark.parametrize("load", ["long-8k", "chat-lognormal", "shared-prefix"])
def test_every_shipped_load_of_a_card_has_an_estimate(load: str) -> None:
    found = changed(f"load={load}")
    for one in found.variants:
        assert one.load.search_s <= one.load.longest_search_s < 12 * HOUR_S + 8 * HOUR_S


def test_a_searchs_requests_are_those_of_a_simulated_one(rtx4090: Settings) -> None:
    """With an engine that takes a second a request, seconds are requests: limits all over the axis, six seeds each."""
    ((plan, _),) = search_plans(rtx4090)
    slo = Slo(Limits(1e6, 40.0), rtx4090.slo.percentile, rtx4090.slo.confidence)
    line = boundary(slo.percentile, slo.confidence, plan.max_requests)
    engine = Roofline(0, 1, 0, 0, 1e9, 1, 2)
    planned = simulated = 0.0
    for knee in (10, 20, 30, 45, 70, 90, 110, 200):
        planned += _search_to_s(knee, plan, slo, line, (1, 60), engine, Lengths(1, 0, 0, 0, 0))
        for seed in range(6):
            known = seen_at_levels(seed, {1: 24, 60: 720}, plan, slo, knee)
            _, sent = run_search(seed, plan=plan, slo=slo, knee=knee, slots=128, expected=known)
            simulated += sent / 6
    assert simulated < planned < 2 * simulated  # on the slow side


def test_a_cpu_is_not_guessed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_settings(["profile=demo"], ROOT)
    assert profile_time(demo) is None
    check = check_time(demo)
    assert (check.status, check.found) == (
        "ok",
        "not estimated: the device cpu-demo gives no memory bandwidth and TFLOPS",
    )
    assert plan_json(monkeypatch, capsys, "profile=demo")["time"] is None


def test_plan_and_doctor_say_it(
    rtx4090: Settings,
    expected: ProfileTime,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = plan_json(monkeypatch, capsys, "profile=rtx4090")
    time = found["time"]
    assert time["stages_s"]["all"] == pytest.approx(expected.total_s, abs=1)
    assert time["measured"] is False and found["time_note"] == "computed; none of it measured on a card"
    row = time["variants"][0]
    parts = (
        row["start_s"]
        + 25
        + sum(row["load_s"][key] for key in ("warmup_s", "fill_s", "levels_s", "search_s"))
    )
    assert row["measure_s"] == pytest.approx(parts, abs=6)
    monkeypatch.setattr("sys.argv", ["quantgate", "plan", "profile=rtx4090"])
    assert main() == 0
    assert f"Expected time: {headline(expected)}. Computed from" in capsys.readouterr().out
    assert check_time(rtx4090).found.startswith(headline(expected))


def plan_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *overrides: str
) -> dict[str, Any]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["quantgate", "plan", "--json", *overrides])
    assert main() == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "1 min"), (89, "1 min"), (3600, "1 h"), (15_000, "4 h 10 min"), (3_570, "1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
