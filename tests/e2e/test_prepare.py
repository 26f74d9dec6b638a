"""The prepared folder is one and the same model to transformers 4.51 (AutoAWQ) and 5 (vLLM)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.models.child import run_module
from pipeline.models.prepare import prepare
from pipeline.models.source import LocalSource
from tests.support.environments import environment_python
from tests.support.tiny_models import QWEN2, write_model

# Long enough for positions to matter: a wrong rope base changes far positions most.
TEXT = "Rivers carry sand to the sea. The town on the hill has 1,234 windows; 清楚地说明。 " * 6


def read_both(model: Path, tmp_path: Path) -> list[tuple[dict[str, Any], np.ndarray]]:
    answers = []
    for environment in ("autoawq", "serve"):
        out = tmp_path / f"{environment}.npy"
        request = {"model": str(model), "text": TEXT, "out": str(out)}
        python = environment_python(environment)
        answers.append((run_module(python, "tests.support.logits", request, tmp_path / "log"), np.load(out)))
    return answers


def assert_same_model(model: Path, tmp_path: Path) -> None:
    (old, old_logits), (new, new_logits) = read_both(model, tmp_path)
    assert old.pop("transformers").startswith("4.51.")
    assert new.pop("transformers").startswith("5.")
    assert old == new  # tokens, chat template, end of text, dtype, generation ids
    # Both compute in float32; they differ in the order of sums only.
    assert np.abs(old_logits - new_logits).max() < 2e-3 * np.abs(old_logits).max()


def test_embedded_model_reads_the_same(prepared_model: Path, tmp_path: Path) -> None:
    assert_same_model(prepared_model, tmp_path)


def test_logits_tell_a_lost_rope_base(prepared_model: Path, tmp_path: Path) -> None:
    """The comparison above must be able to fail: this is the folder as transformers 5 alone would write it."""
    folder = tmp_path / "as-saved-by-5"
    shutil.copytree(prepared_model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    (_, old_logits), (_, new_logits) = read_both(folder, tmp_path)
    assert np.abs(old_logits - new_logits).max() > 0.1 * np.abs(old_logits).max()


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters"])
def test_local_qwen_folder_reads_the_same_whoever_saved_it(tmp_path: Path, spelling: str) -> None:
    config = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    rope = (
        {"rope_theta": 1e6}
        if spelling == "rope_theta"
        else {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    )
    origin = write_model(tmp_path / "origin", {**config, **rope})
    prepare(LocalSource(path=str(origin)), tmp_path / "out", environment_python("serve"))
    assert_same_model(tmp_path / "out", tmp_path)
