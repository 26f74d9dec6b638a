"""A recipe or request that can't work is refused before any minute is spent."""

from __future__ import annotations

import json
import math
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
from tests.support.geometries import QWEN25_7B, SMOLLM2
from tests.support.quantize_requests import tiny_request
from tests.support.tiny_models import prose, write_model, write_texts

GPTQ: dict[str, Any] = {"backend": "llmcompressor", "method": "gptq", "clip_search": False}
FP8: dict[str, Any] = {
    "backend": "llmcompressor", "method": "fp8", "bits": 8, "group_size": None, "zero_point": False, "clip_search": False,
}  # fmt: skip
KV_TEXT = {"kv_samples": 4, "kv_sequence_tokens": 2048}


@pytest.mark.parametrize(
    "bad",
    [
        {"bits": 8},
        {"group_size": 48},
        {"zero_point": False},
        {"backend": "gptq"},
        {"method": "rtn"},
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
        ({"zero_point": False}, "zero_point false with method awq"),
        ({"bits": 8}, "bits 8 with method awq: must be 4 or 16"),
        ({"method": "gptq"}, "method gptq: autoawq makes awq only; set backend to llmcompressor"),
        (GPTQ | {"clip_search": True}, "clip_search true: gptq cuts no weights"),
        (GPTQ | {"bits": 8, "group_size": None}, "bits 8 with method gptq: must be 4"),
        (FP8 | {"bits": 4, "group_size": 128}, "bits 4 with method fp8: must be 8"),
        (FP8 | {"group_size": 128}, "group_size 128 at 8 bits: must be 32, 64 or 128 at 4 bits, else null"),
        (FP8 | {"zero_point": True}, "zero_point true with method fp8: a float has its sign"),
        (FP8 | {"max_share_of_rounding_loss": 1.0}, "with method fp8: it is plain rounding; set it to null"),
        (FP8 | {"clip_search": True}, "clip_search true: fp8 cuts no weights"),
        (
            GPTQ | {"calibrate_kv_scales": True, "kv_samples": 4},
            "kv_samples and kv_sequence_tokens go together",
        ),
        (GPTQ | KV_TEXT, "are for KV scales beside weights that have text of their own"),
        (FP8 | KV_TEXT | {"calibrate_kv_scales": True}, "set samples and sequence_tokens"),
        (
            {"backend": "llmcompressor", "clip_search": False, "bits": 16, "calibrate_kv_scales": True},
            "group_size 128 at 16 bits",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_key(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QuantizeRecipe(**bad)


@pytest.mark.parametrize("given", [{"group_size": 64, "samples": 8, "sequence_tokens": 128}, GPTQ, FP8])
def test_recipe_survives_json(given: dict[str, Any]) -> None:
    recipe = QuantizeRecipe(**given)
    assert QuantizeRecipe.model_validate(json.loads(recipe.model_dump_json())) == recipe


def test_a_method_brings_its_own_believable_errors() -> None:
    ranges = [
        (recipe.effective_error_range, recipe.layer_error_range) for recipe in map(make, (GPTQ, FP8, {}))
    ]
    assert len(set(ranges)) == 3
    # Plain e4m3 rounding of evenly spread and of log-evenly spread weights, see BELIEVABLE_ERRORS.
    (low, high), (layer_low, layer_high) = ranges[1]
    for rms in ((7 / 3) ** 0.5, (3 / (2 * math.log(2))) ** 0.5):
        assert low < layer_low < 0.125 / 12**0.5 / rms < layer_high < high
    assert make(FP8 | {"effective_error_range": (0.0, 0.5)}).effective_error_range == (0.0, 0.5)


def test_what_text_is_read_for() -> None:
    assert not make(FP8).searches_weights and make(GPTQ).searches_weights
    assert make(GPTQ | {"samples": 8, "sequence_tokens": 128, "calibrate_kv_scales": True}).kv_text == (
        8,
        128,
    )
    assert make(GPTQ | {"calibrate_kv_scales": True} | KV_TEXT).kv_text == (4, 2048)


def make(given: dict[str, Any]) -> QuantizeRecipe:
    return QuantizeRecipe(**given)


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


def test_room_of_the_other_methods() -> None:
    """FP8 reads no text; GPTQ holds a layer's Hessians; long sequences for KV scales pass whole, and nothing of them is kept."""
    sizes, short = geometry(QWEN25_7B, "Qwen2.5-7B"), {"samples": 64, "sequence_tokens": 256}
    awq, gptq, fp8, kv = (
        room.room_for(sizes, recipe, on_cuda=True)
        for recipe in (
            make(GPTQ | {"method": "awq"} | short),
            make(GPTQ | short),
            make(FP8),
            make(FP8 | {"calibrate_kv_scales": True, "samples": 4, "sequence_tokens": 8192}),
        )
    )
    assert awq.card_bytes and gptq.card_bytes and fp8.card_bytes and kv.card_bytes
    # The Hessian of 18,944 inputs alone takes 1.44 GB, and is there three times.
    assert 2 * 2**30 < gptq.card_bytes - awq.card_bytes < 5 * 2**30
    assert fp8.card_bytes < awq.card_bytes
    assert kv.card_bytes - fp8.card_bytes == 2 * 8192 * (8 * 3584 + 2 * 18944)
    assert max(gptq.card_bytes, kv.card_bytes) < 23.2 * 2**30, "what a 4090 without a desktop has free"
    assert fp8.disk_bytes > gptq.disk_bytes == awq.disk_bytes
