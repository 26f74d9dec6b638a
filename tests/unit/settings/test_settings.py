"""Settings: what is wrong is named with its file, key and value; params.yaml can't drift from its profile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.errors import UserInputError
from pipeline.load.bounds import requests_needed
from pipeline.settings import check_graph, chosen_profile, load_settings, use
from pipeline.settings.compose import profiles
from pipeline.settings.schema import EvalsetSettings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    for profile in profiles(ROOT):
        (tmp_path / "runs" / profile).mkdir(parents=True)
        shutil.copy(ROOT / f"runs/{profile}/params.yaml", tmp_path / "runs" / profile)
    return tmp_path


@pytest.mark.parametrize("profile", profiles(ROOT))
def test_every_profile_is_valid(profile: str) -> None:
    settings = load_settings([f"profile={profile}"], ROOT)
    assert settings.profile == profile
    assert settings.reference in settings.variants


def test_demo_has_its_five_variants() -> None:
    settings = load_settings(["profile=demo"], ROOT)
    assert list(settings.variants) == ["bf16", "bf16-again", "bf16-fp8kv", "awq", "awq-fp8kv"]
    assert settings.device.emulated


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("profile=nope", ["profile/nope", "demo"]),
        ("model=nope", ["model/nope", "smollm2-135m-instruct"]),
        ("load.levls=3", ["levls"]),
        ("+load.levls=3", ["conf/load/demo.yaml", "levls", "unknown key"]),
        ("load.levels=[0]", ["conf/load/demo.yaml", "levels", "0"]),
        ("variant_names=[zz]", ["conf/variant/zz.yaml", "no such variant", "awq-fp8kv"]),
        ("load.workload.input_tokens=900", ["912", "max_model_len 512"]),
        ("load.search.start=100", ["conf/load/demo.yaml", "search.start 100 is above search.maximum 64"]),
        ("+load.search.minimum=20", ["conf/load/demo.yaml", "search.start 8 is below search.minimum 20"]),
        ("device.memory_utilization=1.2", ["conf/device/cpu-demo.yaml", "memory_utilization", "1.2"]),
        ("reference=foo", ["reference 'foo'", "bf16"]),
        ("evalset.divergence.top_k=50", ["conf/evalset/team-demo.yaml", "divergence.top_k", "50"]),
        ("+policy.task_margins.x=2", ["conf/policy/demo.yaml", "task_margins.x", "2"]),
        ("model.source.kind=ftp", ["conf/model/smollm2-135m-instruct.yaml", "source"]),
    ],
)
def test_wrong_input_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(UserInputError) as caught:
        load_settings([override], ROOT)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and str(ROOT) not in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("weights: awq\nkv_cache_dtype: fp8\n", "kv_scales None with kv_cache_dtype fp8"),
        ("weights: awq\nkv_cache_dtype: bfloat16\nkv_scales: one\n", "an fp8 cache needs one or checkpoint"),
        ("weights: awq\nkv_cache_dtype: fp8\nkv_scales: checkpoint\n", "its weights awq have none"),
        (
            "weights: awq-lc-kv\nkv_cache_dtype: fp8\nkv_scales: one\n",
            "weights awq-lc-kv with calibrated KV scales",
        ),
        ("weights: awq-lc-kv\nkv_cache_dtype: bfloat16\n", "weights awq-lc-kv with calibrated KV scales"),
    ],
)
def test_scales_that_the_weights_do_not_have_are_refused(clone: Path, variant: str, message: str) -> None:
    (clone / "conf/variant/awq-fp8kv.yaml").write_text(f"{variant}description: x\n")
    with pytest.raises(UserInputError, match=message):
        load_settings(["profile=demo-full"], clone)


def test_variant_file_with_a_wrong_value(clone: Path) -> None:
    (clone / "conf/variant/awq.yaml").write_text("weights: awq\nkv_cache_dtype: fp9\ndescription: x\n")
    with pytest.raises(UserInputError, match=r"conf/variant/awq\.yaml: kv_cache_dtype is 'fp9'.*fp8"):
        load_settings(["profile=demo"], clone)


def test_variant_file_that_is_not_yaml(clone: Path) -> None:
    (clone / "conf/variant/awq.yaml").write_text("weights: [awq\n")
    with pytest.raises(UserInputError, match=r"conf/variant/awq\.yaml"):
        load_settings(["profile=demo"], clone)


def test_the_stages_are_what_the_profiles_say(clone: Path) -> None:
    use("demo", clone)
    for name in ("params.yaml", *(f"runs/{profile}/params.yaml" for profile in profiles(ROOT))):
        assert (clone / name).read_text() == (ROOT / name).read_text()
    assert chosen_profile(clone) == "demo"
    for profile in profiles(ROOT):
        check_graph(load_settings([f"profile={profile}"], clone), clone)
        for root in (clone, ROOT):
            assert os.readlink(root / f"runs/{profile}/dvc.yaml") == "../stages.yaml"


@pytest.mark.parametrize(
    ("flags", "pinned"),
    [
        ((), None),
        (("--attention-backend", "FLASHINFER"), "FLASHINFER"),
        (("--max-logprobs", "25", "--attention-backend=TRITON_ATTN"), "TRITON_ATTN"),
        (("--attention-backend",), None),
    ],
)
def test_a_pinned_attention_backend_is_read_from_the_flags(
    flags: tuple[str, ...], pinned: str | None
) -> None:
    variant = load_settings(["profile=demo"], ROOT).variants["bf16"]
    assert variant.model_copy(update={"engine_args": flags}).attention_backend == pinned


def test_the_rtx4090_has_its_variants_and_eval_sets() -> None:
    settings = load_settings(["profile=rtx4090"], ROOT)
    full = load_settings(["profile=rtx4090-full"], ROOT)
    # Quantizer and scales can be told apart, and the cache's dtype from its kernel.
    wanted = {
        "bf16",
        "bf16-again",
        "bf16-fp8kv-calibrated",
        "awq",
        "awq-lc",
        "awq-fp8kv",
        "awq-fp8kv-calibrated",
    }
    wanted |= {"awq-triton", "awq-kv-per-token-head"}
    assert wanted <= set(settings.variants)
    assert set(full.variants) == set(settings.variants) | {
        "bf16-fp8kv", "awq-pinned", "gptq", "fp8", "fp8-fp8kv-calibrated",
    }  # fmt: skip
    own = {"profile", "variants", "quantizers", "hand_calculation", "choices"}
    assert full.model_dump(exclude=own) == settings.model_dump(exclude=own)
    assert (settings.server.max_model_len, settings.policy.required_sequences) == (8192, 60)
    own, further = settings.evalset.own_tasks, settings.evalset.further
    assert [task.task for task in own] == ["team_demo", "team_demo_short"]
    assert {task.task for task in further if task.from_hub} == {"gsm8k_cot", "mmlu_pro", "ceval-valid"}
    assert all(task.task in settings.policy.task_margins for task in further)


def test_the_rtx4090s_load_can_decide_its_slo() -> None:
    """At 60 streams it asks for more requests than a p99 takes where one is over the limit."""
    settings = load_settings(["profile=rtx4090"], ROOT)
    load, slo = settings.load, settings.slo
    level = settings.policy.required_sequences
    assert level in load.levels
    asked = max(load.min_requests, int(load.requests_per_stream * level)) * load.repeats
    assert asked >= requests_needed(slo.percentile, 1, slo.confidence)


@pytest.mark.parametrize("name", ["mmlu-pro", "gsm8k", "ifeval", "ceval"])
def test_benchmarks_are_entries_for_machines_that_reach_a_hub(name: str) -> None:
    found = EvalsetSettings.model_validate(yaml.safe_load((ROOT / f"conf/evalset/{name}.yaml").read_text()))
    assert found.folder is None and found.metric and found.name == name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batching": "sometimes"}, "'served', 'serial' or 'invariant'"),
        ({"further": [{"task": "team_demo"}]}, "named twice"),
        ({"folder": None}, "divergence needs a set of your own"),
        ({"from_hub": True}, "from_hub is for further tasks"),
        ({"slice_items": {"chinese": 0}}, "greater than or equal to 1"),
        ({"divergence": {"prompts": 1, "continuation_tokens": 4, "top_k": 5}}, "greater than or equal to 2"),
    ],
)
def test_an_eval_set_that_cant_be_is_refused(changes: dict[str, object], said: str) -> None:
    good = yaml.safe_load((ROOT / "conf/evalset/team-demo.yaml").read_text())
    EvalsetSettings.model_validate(good)
    with pytest.raises(ValidationError, match=said):
        EvalsetSettings.model_validate(good | changes)


def test_every_variants_quality_comes_after_the_references(clone: Path) -> None:
    """DVC is told through params.yaml; a sequential run also stops by the policy, so it depends on it."""
    found = _stages(clone, "demo")
    after = {name: entry["quality_after"] for name, entry in found["variants"].items()}
    assert after.pop("bf16") == "runs/demo/prepare.json"
    assert set(after.values()) == {"runs/demo/quality/bf16.logprobs.parquet"}
    assert (found["evalset_folder"], found["stops_by"]) == (
        "evalsets/team-demo",
        "conf/evalset/team-demo.yaml",
    )
    profile = clone / "conf/profile/demo.yaml"
    profile.write_text(profile.read_text().replace("/evalset: team-demo", "/evalset: team-demo-all"))
    use("demo", clone)
    found = _stages(clone, "demo")
    assert found["variants"]["awq"]["quality_after"] == "runs/demo/quality/bf16.json"
    assert found["stops_by"] == "conf/policy/demo.yaml"


def _stages(clone: Path, profile: str) -> dict[str, Any]:
    listed: dict[str, Any] = yaml.safe_load((clone / f"runs/{profile}/params.yaml").read_text())
    return listed


@pytest.mark.parametrize("change", ["gone", "more", "other", "missing"])
def test_stages_that_drifted_are_refused(clone: Path, change: str) -> None:
    """A variant that the list lacks, one that it has too many, another eval set, and no list at all."""
    path, listed = clone / "runs/demo/params.yaml", _stages(clone, "demo")
    if change == "gone":
        del listed["variants"]["awq"]
    elif change == "more":
        listed["variants"]["more"] = listed["variants"]["awq"]
    else:
        listed["evalset"] = "ceval"
    path.write_text(yaml.safe_dump(listed))
    if change == "missing":
        path.unlink()
    with pytest.raises(UserInputError, match="quantgate use demo"):
        check_graph(load_settings(["profile=demo"], clone), clone)
    check_graph(load_settings(["profile=rtx4090"], clone), clone)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "quantgate use demo"),
        ("profile: nope\n", "profile is 'nope'; allowed are demo"),
        ("{}\n", "profile is missing"),
        ("profile: demo\nload: long-8k\n", "unknown key load"),
        ("[demo]\n", "must be a mapping"),
    ],
)
def test_parameters_that_name_no_profile_are_refused(clone: Path, text: str | None, said: str) -> None:
    path = clone / "params.yaml"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserInputError, match=said):
        chosen_profile(clone)


def test_a_broken_profile_keeps_the_stages_it_had(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (clone / "conf/profile/demo.yaml").read_text()
    (clone / "conf/profile/mine.yaml").write_text(good.replace("profile: demo", "profile: mine"))
    use("mine", clone)
    assert chosen_profile(clone) == "mine"
    before = _stages(clone, "mine")
    assert before["profile"] == "mine" and "awq" in before["variants"]
    (clone / "conf/profile/mine.yaml").write_text("# @package _global_\nprofile: mine\n")
    use("demo", clone)
    assert "profile mine stay as they were" in capsys.readouterr().err
    assert _stages(clone, "mine") == before and chosen_profile(clone) == "demo"
    with pytest.raises(UserInputError, match=r"conf/profile/mine\.yaml: variant_names must be a list"):
        use("mine", clone)
