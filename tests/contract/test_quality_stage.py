"""The stage `quality` from end to end against the mock engine: order, stopping early, kept answers, and what it leaves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.batching import INVARIANT
from pipeline.quality.stream import read_stream
from pipeline.results import EngineFacts, Quality, load, save
from pipeline.serving.command import ServeSpec
from pipeline.settings import Settings, load_settings
from pipeline.stages import measure, quality
from pipeline.stages.context import WEIGHTS
from pipeline.texts import load_texts
from pipeline.verdict.policy import Policy
from pipeline.verdict.quality import quality_evidence
from tests.support import sample_results
from tests.support.mock_vllm import fake_python
from tests.support.zoo_set import YAML

ROOT = Path(__file__).resolve().parents[2]
REQUIRE_SAME_ENGINE = quality._require_same_engine  # the fixture takes it out
FOLDERS = {"bf16": "bf16", "bf16-again": "bf16", "bf16-fp8kv": "bf16", "awq": "awq"}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone after the stage `measure`: conf, an eval set, checkpoints that are only a tokenizer, and earlier results."""
    from tokenizers import ByteLevelBPETokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # the mock needn't wait for a real engine's lease
    shutil.copytree(ROOT / "conf", "conf")
    shutil.copytree(ROOT / "evalsets/calibration", "evalsets/calibration")
    zoo = Path("evalsets/zoo")
    zoo.mkdir()
    (zoo / "zoo.yaml").write_text(YAML)
    items = [
        {
            "id": f"i{n}", "slice": "s", "cluster": f"c{n}", "prompt": f"Cage {n} holds the",
            "choices": [" lion", " seal", " crow", " toad"], "answer": n % 4,
        }
        for n in range(40)
    ]  # fmt: skip
    (zoo / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [item["prompt"] + "".join(item["choices"]) for item in items], vocab_size=400
    )
    for scheme in ("bf16", "awq"):
        folder = Path("artifacts/weights") / scheme
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "scheme": scheme}))
    save("results/environment.json", sample_results.environment())
    for row in sample_results.plan().rows:
        save(f"results/plan/{row.variant}.json", row)
        facts = EngineFacts.of(sample_results.provenance(row.variant), 4480, None)
        save(f"results/measure/{row.variant}.engine.json", facts)
    engine(monkeypatch, tmp_path)
    return tmp_path


def engine(monkeypatch: pytest.MonkeyPatch, folder: Path, **script: Any) -> None:
    """What is served from now on."""
    monkeypatch.setattr(quality, "python_of", lambda *_: fake_python(folder, **script))
    monkeypatch.setattr(quality, "_require_same_engine", lambda *_: None)


def settings(profile: str = "demo", **changes: str) -> Settings:
    values = {
        "folder": "evalsets/zoo", "task": "zoo", "items": "null", "slice_items": "{}", "further": "[]",
        "divergence": "{prompts: 4, continuation_tokens: 3, top_k: 5}",
    } | changes  # fmt: skip
    overrides = [f"++evalset.{key}={value}" for key, value in values.items()]
    return load_settings(
        [
            f"profile={profile}",
            "evalset=team-demo",
            "policy.quality_margin=0.3",
            "~evalset.slice_items",
            *overrides,
        ]
    )


def test_all_score_the_references_stream_and_leave_one_file_each(workspace: Path) -> None:
    for name in FOLDERS:
        quality.run(settings(), name)
    streams = {name: read_stream(Path(f"results/quality/{name}.logprobs.parquet")) for name in FOLDERS}
    assert len({stream.sha256 for stream in streams.values()}) == 1
    assert streams["awq"] == streams["bf16"] and len(streams["bf16"].prompts) == 4
    record = load("results/quality/awq.json", Quality)
    assert (record.task, record.n, record.looks) == ("zoo", 40, 1)
    assert record.format is not None and record.format.bos_tokens == 0
    assert [phase.name for phase in record.phases][2:] == ["zoo", "divergence", "shutdown", "records"]
    assert sorted(path.name for path in Path("results/quality").iterdir()) == sorted(
        f"{name}.{end}" for name in FOLDERS for end in ("json", "logprobs.parquet")
    )
    assert list(Path("artifacts/requests").iterdir()) == []


def test_a_variant_without_the_references_stream_is_refused(workspace: Path) -> None:
    with pytest.raises(UserInputError, match=r"results/quality/bf16\.logprobs\.parquet: no such file"):
        quality.run(settings(), "awq")


def test_a_sequential_run_stops_where_reference_and_control_dont(workspace: Path) -> None:
    """The mock answers all variants alike: no loss, decided at a margin of 30 points as soon as the bound allows."""
    for name in FOLDERS:
        quality.run(settings(looks="4", divergence="null"), name)
    kept = {name: load(f"results/quality/{name}.json", Quality) for name in FOLDERS}
    assert {name: record.n for name, record in kept.items()} == {
        "bf16": 40, "bf16-again": 40, "bf16-fp8kv": 20, "awq": 20,
    }  # fmt: skip
    assert kept["awq"].samples == kept["bf16"].samples[:20]
    assert read_stream(Path("results/quality/awq.logprobs.parquet")).prompts == ()


def test_further_tasks_stop_early_too(workspace: Path) -> None:
    """Each by its own reference and margin; a reference that wasn't scored on a task is said, not taken for none."""
    zoo = Path("evalsets/zoo")
    (zoo / "again.yaml").write_text(YAML.replace("task: zoo", "task: again"))
    changes = {"looks": "4", "divergence": "null", "further": "[{task: again, items: 32}]"}
    for name in ("bf16", "bf16-again", "awq"):
        quality.run(settings(**changes), name)
    kept = {name: load(f"results/quality/{name}.json", Quality) for name in ("bf16", "bf16-again", "awq")}
    assert {name: record.further["again"].n for name, record in kept.items()} == {
        "bf16": 32, "bf16-again": 32, "awq": 16,
    }  # fmt: skip
    assert kept["awq"].further["again"].samples == kept["bf16"].further["again"].samples[:16]
    policy = Policy(required_sequences=1, quality_margin=0.3, confidence=0.95)
    found = quality_evidence("awq", "bf16", "bf16-again", kept, {}, policy).further["again"].delta
    assert found is not None and (found.look, found.planned_looks) == (2, [8, 16, 24, 32])
    assert found.delta_ci is not None and found.delta_ci[0] > -0.3
    quality.run(settings(**changes | {"further": "[]"}), "bf16")
    with pytest.raises(UserInputError, match=r"wasn't scored on the task again; run the stage quality@bf16"):
        quality.run(settings(**changes), "awq")


@pytest.mark.parametrize(("mode", "sequences"), [("served", 64), ("serial", 1)])
def test_the_engine_batches_as_the_eval_set_says(workspace: Path, mode: str, sequences: int) -> None:
    quality.run(settings(batching=mode, divergence="null"), "bf16")
    record = load("results/quality/bf16.json", Quality)
    words = record.provenance.command
    assert words[words.index("--max-num-seqs") + 1] == str(sequences)
    assert "--no-enable-prefix-caching" in words and record.batching == mode


def test_batch_invariance_is_a_cards() -> None:
    with pytest.raises(UserInputError, match=r"batching invariant needs a card of compute capability 8\.0"):
        settings(batching="invariant")


def test_an_engine_that_dies_leaves_the_answers_and_no_result(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(monkeypatch, workspace, die_at_request=10)
    with pytest.raises(EngineFailedError):
        quality.run(settings(), "bf16")
    assert not Path("results/quality").exists()
    assert len(list(Path("artifacts/requests").glob("*.sqlite"))) == 1
    engine(monkeypatch, workspace)
    quality.run(settings(), "bf16")
    assert load("results/quality/bf16.json", Quality).n == 40
    assert list(Path("artifacts/requests").iterdir()) == []


def test_an_item_in_the_calibration_text_stops_it_before_the_engine(workspace: Path) -> None:
    text = json.loads(Path("evalsets/calibration/calibration.jsonl").read_text().split("\n")[0])["text"]
    path = Path("evalsets/zoo/items.jsonl")
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps(json.loads(first) | {"prompt": " ".join(text.split()[:30])}) + "\n" + rest)
    with pytest.raises(UserInputError, match="eval item 'i0' is also in the text"):
        quality.run(settings(), "bf16")
    assert not Path("results/logs").exists()


def test_another_engine_than_measured_is_refused(workspace: Path) -> None:
    facts = EngineFacts.of(sample_results.provenance("bf16"), 4480, 2**26)
    given = ServeSpec(
        "0.32.0", Path("m"), "bf16", "cpu", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=2**26
    )
    REQUIRE_SAME_ENGINE("bf16", facts, facts, given)
    REQUIRE_SAME_ENGINE("bf16", facts, facts.model_copy(update={"kv_cache_bytes": None}), given)
    with pytest.raises(EngineFailedError, match="was measured with kv_tokens 4480 and scored with 4481"):
        REQUIRE_SAME_ENGINE("bf16", facts, facts.model_copy(update={"kv_tokens": 4481}), given)
    kernels = facts.model_copy(update={"attention_backend": "TRITON_ATTN"})
    with pytest.raises(EngineFailedError, match="attention_backend 'CPU_ATTN' and scored with 'TRITON_ATTN'"):
        REQUIRE_SAME_ENGINE("bf16", facts, kernels, given)


def test_pools_that_each_start_profiled_may_differ_and_invariant_kernels_do() -> None:
    facts = EngineFacts.of(sample_results.provenance("bf16"), 113_984, None)
    spec = ServeSpec("0.32.0", Path("m"), "bf16", "cuda", max_model_len=512, max_num_seqs=8)
    REQUIRE_SAME_ENGINE("bf16", facts, facts.model_copy(update={"kv_tokens": 115_344}), spec)
    other = facts.model_copy(update={"attention_backend": "TRITON_ATTN"})
    with pytest.raises(EngineFailedError, match="attention_backend"):
        REQUIRE_SAME_ENGINE("bf16", facts, other, spec)
    REQUIRE_SAME_ENGINE("bf16", facts, other, dataclasses.replace(spec, environment={INVARIANT: "1"}))
    with pytest.raises(EngineFailedError, match="kv_cache_dtype"):
        REQUIRE_SAME_ENGINE(
            "bf16",
            facts,
            facts.model_copy(update={"kv_cache_dtype": "fp8"}),
            dataclasses.replace(spec, environment={INVARIANT: "1"}),
        )


def test_a_published_task_beside_the_teams_own_comes_from_the_hub() -> None:
    """The folder's tasks are read from it, the others are lm-eval's own; both belong to one eval set."""
    settings = load_settings(["profile=rtx4090"], Path(__file__).resolve().parents[2])
    evalset = settings.evalset
    asked = [quality._asked(settings, task) for task in (evalset, *evalset.further)]
    assert {run.task for run in asked if run.folder is None} == {"gsm8k_cot", "mmlu_pro", "ceval-valid"}
    assert {run.task for run in asked if run.folder} == {"team_demo", "team_demo_short"}
    texts = load_texts(ROOT / settings.calibration.file)
    assert all(run.calibration == ({} if run.folder else texts) for run in asked)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("bf16-fp8kv", 0.5, "bf16-fp8kv: the variant means KV scales of 1.0 .* took the checkpoint's"),
        ("awq-fp8kv-calibrated", 1.0, "awq-fp8kv-calibrated: .* runs at scale 1.0"),
    ],
)
def test_kv_scales_that_the_variant_does_not_mean_stop_both_stages(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, name: str, scale: float, message: str
) -> None:
    """Before anything is measured, with the exit code of an engine that failed."""
    probe = {
        "kv_cache_dtype": {"fp8": 1},
        "kv_scale_min": scale,
        "kv_scale_max": scale,
        "kv_scales": {"model.layers.0.self_attn.attn": [scale, scale]},
    }
    python = fake_python(workspace, extra_log=f"INFO quantgate-provenance: {json.dumps(probe)}")
    shutil.copytree(WEIGHTS / "awq", WEIGHTS / "awq-lc-kv")
    save(f"results/plan/{name}.json", sample_results.plan().rows[-1].model_copy(update={"variant": name}))
    save(
        f"results/measure/{name}.engine.json", EngineFacts.of(sample_results.provenance("awq-fp8kv"), 1, None)
    )
    full = settings(profile="demo-full", looks="1")
    for stage in (measure, quality):
        monkeypatch.setattr(stage, "python_of", lambda *_: python)
    monkeypatch.setattr(measure, "make_driver", lambda *_: SimpleNamespace(session=nullcontext))
    for stage in (measure, quality):
        with pytest.raises(EngineFailedError, match=message) as caught:
            stage.run(full, name)
        assert caught.value.exit_code == 4
