"""One variant through `measure` and `quality` on a card whose profiling finds another pool at every start.

The stages are real; the mock stands in the engine's place, NVML answers from a recording, and the load is left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import EngineFailedError
from pipeline.results import BudgetTerm, EngineFacts, Measurement, Quality, load, save
from pipeline.settings import Settings, load_settings
from pipeline.stages import measure, quality
from tests.support import sample_results
from tests.support.mock_vllm import fake_python
from tests.support.recorded_nvml import RecordedNvml, rtx_4090
from tests.support.zoo_set import YAML, zoo_items

ROOT = Path(__file__).resolve().parents[2]
KAPPA_BYTES = 57_344  # Qwen2.5-7B in BF16: 2 x 28 layers x 4 heads x 128 x 2 bytes
PROFILED = {"128": 113_984, "1": 115_344}
"""Tokens that profiling finds with 128 sequences and with one: their graphs and sampler state differ."""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(rtx_4090()))
    shutil.copytree(ROOT / "conf", "conf")
    shutil.copytree(ROOT / "evalsets/calibration", "evalsets/calibration")
    zoo = Path("evalsets/zoo")
    zoo.mkdir()
    (zoo / "zoo.yaml").write_text(YAML)
    (zoo / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in zoo_items()))
    weights = Path("artifacts/weights/bf16")
    weights.mkdir(parents=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([item["prompt"] for item in zoo_items()], vocab_size=400)
    tokenizer.save(str(weights / "tokenizer.json"))
    (weights / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (weights / "config.json").write_text('{"model_type": "qwen2"}')
    save("results/environment.json", sample_results.environment())
    row = sample_results.plan().rows[0]
    blocks = {
        "block_size": 16,
        "block_bytes": 16 * KAPPA_BYTES,
        "kappa_bytes": KAPPA_BYTES,
        "max_model_len": 8192,
    }
    unknown = dict.fromkeys(("predicted_tokens", "predicted_tokens_band", "blocks_per_sequence"))
    planned = row.capacity.model_copy(update={**blocks, **unknown})
    size = 15 * 2**30
    weights_term = BudgetTerm(name="weights", predicted_bytes=size, low_bytes=size, high_bytes=size)
    save("results/plan/bf16.json", row.model_copy(update={"capacity": planned, "terms": [weights_term]}))
    monkeypatch.setattr(measure, "make_driver", lambda *_: SimpleNamespace(session=lambda _: nullcontext()))
    monkeypatch.setattr(measure, "run_load", lambda *_: None)
    serve_from(monkeypatch, tmp_path)
    return tmp_path


def serve_from(monkeypatch: pytest.MonkeyPatch, folder: Path, **script: Any) -> None:
    python = fake_python(folder, **{"kappa_bytes": KAPPA_BYTES, "profiled_tokens": PROFILED} | script)
    for stage in (measure, quality):
        monkeypatch.setattr(stage, "python_of", lambda *_: python)


def settings(batching: str) -> Settings:
    values = {"folder": "evalsets/zoo", "task": "zoo", "items": "null", "further": "[]", "looks": "1"}
    values |= {"divergence": "null", "batching": batching}
    return load_settings(["profile=rtx4090", *(f"++evalset.{key}={value}" for key, value in values.items())])


def option(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize(
    ("batching", "sequences"), [("served", "128"), ("serial", "1"), ("invariant", "128")]
)
def test_quality_is_served_with_the_pool_that_was_measured(
    workspace: Path, batching: str, sequences: str
) -> None:
    measure.run(settings(batching), "bf16")
    facts = load("results/measure/bf16.engine.json", EngineFacts)
    assert (facts.kv_tokens, facts.kv_cache_bytes) == (113_984, 113_984 * KAPPA_BYTES)
    quality.run(settings(batching), "bf16")
    record = load("results/quality/bf16.json", Quality)
    assert [phase.name for phase in record.phases] == [
        "preparation", "engine start", "zoo", "shutdown", "records",
    ]  # fmt: skip
    assert sum(phase.seconds for phase in record.phases) == pytest.approx(record.wall_s, abs=0.05)
    measurement = load("results/measure/bf16.json", Measurement)
    assert [phase.name for phase in measurement.phases] == [
        "preparation", "engine start", "shutdown", "records",
    ]  # fmt: skip
    assert sum(phase.seconds for phase in measurement.phases) == pytest.approx(measurement.wall_s, abs=0.05)
    scored = record.provenance
    assert option(scored.command, "--kv-cache-memory-bytes") == str(113_984 * KAPPA_BYTES)
    assert option(scored.command, "--max-num-seqs") == sequences
    assert scored.variables == ({"VLLM_BATCH_INVARIANT": "1"} if batching == "invariant" else {})
    measured = json.loads(Path("results/measure/bf16.json").read_text())["provenance"]["command"]
    assert option(measured, "--kv-cache-memory-bytes") is None
    assert option(measured, "--max-num-batched-tokens") == option(scored.command, "--max-num-batched-tokens")


def test_what_profiling_alone_explains_is_no_failure(workspace: Path) -> None:
    """A pool whose bytes aren't known is profiled anew, and may then be another."""
    measure.run(settings("serial"), "bf16")
    facts = load("results/measure/bf16.engine.json", EngineFacts)
    save("results/measure/bf16.engine.json", facts.model_copy(update={"kv_cache_bytes": None}))
    quality.run(settings("serial"), "bf16")
    assert "--kv-cache-memory-bytes" not in load("results/quality/bf16.json", Quality).provenance.command


def test_another_pool_than_was_given_is_one(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure.run(settings("served"), "bf16")
    serve_from(monkeypatch, workspace, kv_cache_tokens=113_968)
    with pytest.raises(EngineFailedError, match="measured with kv_tokens 113984 and scored with 113968"):
        quality.run(settings("served"), "bf16")
