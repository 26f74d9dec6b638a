"""The stage `verdict` over result files as the stages before it leave them: decisions, and the ladder where quality was lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.load.records import write_records
from pipeline.quality.stream import ScoredStream, stream_sha256, write_stream
from pipeline.results import Quality, Verdict, load, save
from pipeline.runs import point_at
from pipeline.settings import load_settings
from pipeline.stages import verdict
from tests.support.sample_results import sample_results

ROOT = Path(__file__).resolve().parents[2]
LOST = 60  # of 300 items: far beyond the demo's margin of 3 points


def worse(scored: Quality) -> Quality:
    """The same run, wrong on the first items that it had right."""
    right = [index for index, sample in enumerate(scored.samples) if sample.correct][:LOST]
    samples = [
        sample.model_copy(update={"correct": sample.correct and index not in right})
        for index, sample in enumerate(scored.samples)
    ]
    return scored.model_copy(update={"samples": samples})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample run's files in a clone, with `awq-fp8kv` wrong on many items."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    point_at("demo")
    bundle = sample_results()
    folder = tmp_path / "results"
    save(folder / "plan.json", bundle.plan)
    save(folder / "environment.json", bundle.environment)
    for name, measured in bundle.measurements.items():
        assert measured is not None
        save(folder / "measure" / f"{name}.json", measured)
        write_records(folder / "measure" / f"{name}.requests.parquet", [])
    for name, scored in bundle.qualities.items():
        assert scored is not None
        save(folder / "quality" / f"{name}.json", scored if name != "awq-fp8kv" else worse(scored))
        write_stream(folder / "quality" / f"{name}.logprobs.parquet", ScoredStream(stream_sha256(()), 1, ()))
    config = load_settings(["profile=demo"]).model.config
    (tmp_path / "artifacts/weights/bf16").mkdir()
    (tmp_path / "artifacts/weights/bf16/config.json").write_text(json.dumps(config))
    return folder


def test_a_variant_that_lost_quality_gets_a_ladder(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict.run(load_settings(["profile=demo"]), "")
    found = load(results / "verdict.json", Verdict)
    assert found.variants["awq-fp8kv"].decision == "NO-GO"
    rungs = found.variants["awq-fp8kv"].rescue
    assert [rung.change for rung in rungs] == [
        "FP8 KV at calibrated scales",
        "BF16 KV at a shorter max_model_len",
    ]
    assert all(rung.sequences is not None and rung.command for rung in rungs)
    assert not any(one.rescue for name, one in found.variants.items() if name != "awq-fp8kv")
    assert "awq-fp8kv lost quality; next worth trying:" in capsys.readouterr().out


def test_results_of_another_profile_stop_the_stage(results: Path) -> None:
    path = results / "measure/awq.json"
    content = json.loads(path.read_text()) | {"profile": "demo-full"}
    path.write_text(json.dumps(content))
    with pytest.raises(UserInputError, match="awq: its measurement is of the profile demo-full"):
        verdict.run(load_settings(["profile=demo"]), "")
    assert not (results / "verdict.json").exists()
