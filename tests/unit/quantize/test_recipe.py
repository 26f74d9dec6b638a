"""A recipe or request that can't work is refused before any minute is spent."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.models.architectures import geometry
from pipeline.quantize import room
from pipeline.quantize.base import backend, check_request, check_size, quantize
from pipeline.settings.schema import QuantizeRecipe
from tests.support.geometries import SMOLLM2
from tests.support.quantize_requests import tiny_request
from tests.support.tiny_models import prose, write_model, write_texts


@pytest.mark.parametrize(
    "bad",
    [
        {"bits": 8},
        {"group_size": 48},
        {"zero_point": False},
        {"backend": "gptq"},
        {"samples": 0},
        {"sequence_tokens": 8},
        {"max_perplexity_ratio": 1.0},
        {"effective_error_range": (0.2, 0.1)},
        {"samples": 4, "sequence_tokens": 128, "min_effective_tokens": 1024},
        {"groupsize": 64},
    ],
)
def test_impossible_recipes_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeRecipe(**bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"backend": "llmcompressor", "bits": 16, "group_size": None, "calibrate_kv_scales": True},
            "clip_search true: at 16 bits no weight is cut",
        ),
        (
            {"calibrate_kv_scales": True},
            "calibrate_kv_scales true: autoawq can't; set backend to llmcompressor",
        ),
        ({"bits": 16, "group_size": None}, "bits 16 leaves nothing to do"),
        ({"group_size": None}, "group_size None at 4 bits"),
        (
            {"backend": "llmcompressor", "clip_search": False, "bits": 16, "calibrate_kv_scales": True},
            "group_size 128 at 16 bits",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_key(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QuantizeRecipe(**bad)


def test_recipe_survives_json() -> None:
    recipe = QuantizeRecipe(group_size=64, samples=8, sequence_tokens=128)
    assert QuantizeRecipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


@pytest.mark.parametrize("name", ["autoawq", "llmcompressor"])
def test_backend_is_found_by_its_module_and_keeps_the_heap(name: str) -> None:
    found = backend(name)
    assert (found.name, found.environment) == (name, name)
    assert int(found.process_environment["MALLOC_MMAP_THRESHOLD_"]) > 1 << 30
    code = f"import sys; from pipeline.quantize.base import backend; backend('{name}'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, (
        "torch is only in the environment"
    )


def test_unknown_backend_is_named() -> None:
    with pytest.raises(UserInputError, match=r"quantizer\.backend='gptq' is unknown"):
        backend("gptq")


def test_sound_request_passes(tmp_path: Path) -> None:
    check_request(tiny_request(tmp_path))


def test_group_size_that_does_not_divide_is_refused_with_those_that_do(tmp_path: Path) -> None:
    request = tiny_request(tmp_path, group_size=128)
    config = json.loads((request.model_dir / "config.json").read_text())
    config |= {"intermediate_size": 192}
    write_model(request.model_dir, config)
    with pytest.raises(
        UserInputError,
        match=r"group_size=128 doesn't divide the 192 inputs of mlp\.down_proj; use group_size 32 or 64",
    ):
        check_request(request)


def test_heldout_text_that_is_calibration_text_is_refused(tmp_path: Path) -> None:
    request = tiny_request(tmp_path)
    write_texts(request.heldout_file, [*prose(5, seed=2), prose(5, seed=1)[3].replace(" ", "  ")])
    with pytest.raises(UserInputError, match=r"heldout\.jsonl: text 't5' is in .*calibration\.jsonl too"):
        check_request(request)


def test_refused_request_writes_nothing(tmp_path: Path) -> None:
    request = tiny_request(tmp_path)
    (request.model_dir / "tokenizer.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserInputError, match="no tokenizer"):
        quantize(request, sys.executable, log_path=tmp_path / "quantize.log")
    assert sorted(tmp_path.rglob("*")) == before


def test_quantized_model_is_refused(tmp_path: Path) -> None:
    request = tiny_request(tmp_path)
    config = json.loads((request.model_dir / "config.json").read_text())
    (request.model_dir / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(
        UserInputError, match=r"config\.json: quantization_config\.quant_method='awq'; .*unquantized"
    ):
        check_request(request)


def test_size_on_disk_is_held_against_the_planners(tmp_path: Path) -> None:
    """The unquantized folder is 16 bits a weight where the recipe makes 4: both numbers are said."""
    request = tiny_request(tmp_path)
    with pytest.raises(
        QuantgateError,
        match=r"take 1,\d{3},\d{3} bytes, but the planner reckons with \d{3},\d{3}: \+\d+\.\d%",
    ):
        check_size(request, request.model_dir)
    kept = QuantizeRecipe(
        backend="llmcompressor", bits=16, group_size=None, calibrate_kv_scales=True, clip_search=False
    )
    found = check_size(request.model_copy(update={"recipe": kept}), request.model_dir)
    # In float32, as its source has it; only the 2 x 2 scales of 2 bytes aren't there.
    assert found["weight_bytes"] == found["predicted_weight_bytes"] - 8


def test_no_room_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tiny_request(tmp_path)
    monkeypatch.setattr(room, "free_memory", lambda: 2**28)
    with pytest.raises(
        EnvironmentUnfitError, match=r"about \d\.\d\d GiB of memory, and 0\.25 GiB are free"
    ) as caught:
        check_request(request)
    assert caught.value.exit_code == 3
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))  # type: ignore[attr-defined]
    with pytest.raises(
        EnvironmentUnfitError, match=r"about 0\.06 GiB of disk, and 0\.00 GiB are free; free some in .*"
    ):
        check_request(request)


def test_room_grows_with_the_model_and_its_calibration(tmp_path: Path) -> None:
    """For the embedded 135M model at 16 x 128 tokens it must be about the 1.54 GiB that were measured."""
    sizes = geometry(SMOLLM2, "SmolLM2")
    small = room.room_for(sizes, QuantizeRecipe(group_size=64, samples=16, sequence_tokens=128))
    assert 0.9 < small.memory_bytes / (1.54 * 2**30) < 1.3
    large = room.room_for(sizes, QuantizeRecipe(group_size=64, samples=64, sequence_tokens=512))
    assert large.memory_bytes - small.memory_bytes == 4 * (64 * 512 - 16 * 128) * (8 * 576 + 2 * 1536)
    assert large.disk_bytes == small.disk_bytes > 113_924_736
