"""Settings: what is wrong is named with its file, key and value; params.yaml can't drift from its profile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pipeline.errors import UserInputError
from pipeline.settings import load_parameters, load_settings, write_parameters
from pipeline.settings.compose import profiles
from pipeline.settings.schema import EvalsetSettings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copy(ROOT / "params.yaml", tmp_path)
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
        ("load.levls=3", ["levls"]),
        ("+load.levls=3", ["conf/load/demo.yaml", "levls", "unknown key"]),
        ("load.levels=[0]", ["conf/load/demo.yaml", "levels", "0"]),
        ("variant_names=[zz]", ["conf/variant/zz.yaml", "no such variant", "awq-fp8kv"]),
        ("load.workload.input_tokens=900", ["912", "max_model_len 512"]),
        ("load.search.start=100", ["conf/load/demo.yaml", "search.start 100 is above search.maximum 64"]),
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
    assert "\n" not in str(caught.value)


def test_variant_file_with_a_wrong_value(clone: Path) -> None:
    (clone / "conf/variant/awq.yaml").write_text("weights: awq\nkv_cache_dtype: fp9\ndescription: x\n")
    with pytest.raises(UserInputError, match=r"conf/variant/awq\.yaml: kv_cache_dtype is 'fp9'.*fp8"):
        load_settings(["profile=demo"], clone)


def test_variant_file_that_is_not_yaml(clone: Path) -> None:
    (clone / "conf/variant/awq.yaml").write_text("weights: [awq\n")
    with pytest.raises(UserInputError, match=r"conf/variant/awq\.yaml"):
        load_settings(["profile=demo"], clone)


def test_parameters_follow_the_profile(clone: Path) -> None:
    write_parameters("demo", clone)
    assert (clone / "params.yaml").read_text() == (ROOT / "params.yaml").read_text()
    assert load_parameters(clone)["profile"] == "demo"


@pytest.mark.parametrize("name", ["mmlu-pro", "gsm8k", "ifeval", "ceval"])
def test_benchmarks_are_entries_for_machines_that_reach_a_hub(name: str) -> None:
    found = EvalsetSettings.model_validate(yaml.safe_load((ROOT / f"conf/evalset/{name}.yaml").read_text()))
    assert found.folder is None and found.metric and found.name == name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"concurrency": 1}, "greater than or equal to 2"),
        ({"further": [{"task": "team_demo"}]}, "named twice"),
        ({"folder": None}, "need a set of your own"),
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
    found = load_parameters(clone)
    after = {name: entry["quality_after"] for name, entry in found["variants"].items()}
    assert after.pop("bf16") == "results/prepare.json"
    assert set(after.values()) == {"results/quality/bf16.logprobs.parquet"}
    assert (found["evalset_folder"], found["stops_by"]) == (
        "evalsets/team-demo",
        "conf/evalset/team-demo.yaml",
    )
    profile = clone / "conf/profile/demo.yaml"
    profile.write_text(profile.read_text().replace("/evalset: team-demo", "/evalset: team-demo-all"))
    write_parameters("demo", clone)
    found = load_parameters(clone)
    assert found["variants"]["awq"]["quality_after"] == "results/quality/bf16.json"
    assert found["stops_by"] == "conf/policy/demo.yaml"


def test_parameters_that_drifted_are_refused(clone: Path) -> None:
    path = clone / "params.yaml"
    parameters = yaml.safe_load(path.read_text())
    del parameters["variants"]["awq"]
    path.write_text(yaml.safe_dump(parameters))
    with pytest.raises(UserInputError, match="quantgate use demo"):
        load_parameters(clone)


def test_missing_parameters(clone: Path) -> None:
    (clone / "params.yaml").unlink()
    with pytest.raises(UserInputError, match="quantgate use demo"):
        load_parameters(clone)
