"""Real AutoAWQ on tiny models: a sound checkpoint passes, and every way to break one fails the proof."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import EngineFailedError, QuantgateError, UserInputError
from pipeline.models.child import run_module
from pipeline.quantize import autoawq
from pipeline.quantize.base import QuantizeRequest, quantize
from pipeline.results import ModuleCount, Quantization
from pipeline.settings import load_settings
from pipeline.settings.schema import QuantizeRecipe
from tests.support.environments import environment_python
from tests.support.tiny_models import LLAMA, LLAMA_MHA, QWEN2, prose, write_texts

ROOT = Path(__file__).resolve().parents[2]
RECIPE = QuantizeRecipe(
    group_size=64,
    samples=4,
    sequence_tokens=128,
    clip_search=False,
    min_effective_tokens=512,
    max_perplexity_ratio=1.2,
    effective_error_range=(0.02, 0.35),
)
Tensors = dict[str, np.ndarray]
TinyModel = Callable[[dict[str, Any]], Path]
WIDE_OPEN: dict[str, Any] = {"effective_error_range": (0.0, 0.99), "layer_error_range": (0.0, 0.99)}
Q_PROJ = "model.layers.1.self_attn.q_proj"


def make_request(folder: Path, model: Path, recipe: QuantizeRecipe = RECIPE) -> QuantizeRequest:
    return QuantizeRequest(
        scheme="awq",
        model_dir=model,
        out_dir=folder / "out",
        calibration_file=write_texts(folder / "calibration.jsonl", prose(10, seed=1)),
        heldout_file=write_texts(folder / "heldout.jsonl", prose(10, seed=2)),
        recipe=recipe,
    )


@pytest.fixture(scope="module")
def sound(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[QuantizeRequest, Quantization]:
    """A quantized tiny Llama and its record."""
    folder = tmp_path_factory.mktemp("sound")
    request = make_request(folder, tiny_model(LLAMA))
    return request, quantize(request, environment_python("autoawq"), log_path=folder / "quantize.log")


def test_record_says_what_was_done(sound: tuple[QuantizeRequest, Quantization]) -> None:
    request, record = sound
    assert record.quantized_modules == ModuleCount(expected=14, found=14, missing=[])
    assert record.unquantized_modules == {
        "lm_head": "shares model.embed_tokens",
        "model.embed_tokens": "float32",
    }
    assert (record.bits, record.group_size, record.zero_point) == (4, 64, True)
    assert (record.calibration.effective_samples, record.calibration.effective_tokens) == (4, 512)
    error = record.effective_error
    assert len(error.per_layer) == 2 and error.worst_layer.value == max(error.per_layer) < 0.20
    assert 0.02 < error.mean < error.worst.value < 0.35
    assert 0.8 < record.perplexity.ratio < 1.2  # a model of random weights has nothing to lose
    assert record.perplexity.round_to_nearest is not None and record.perplexity.round_to_nearest > 0.8
    assert record.versions["autoawq"] == "0.2.9"
    assert 0 < record.weight_bytes == record.predicted_weight_bytes < record.original_weight_bytes
    assert record.peak_memory_bytes > 2**27 and record.peak_device_memory_bytes is None
    assert Quantization.model_validate_json(record.model_dump_json()) == record
    config = json.loads((request.out_dir / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert (request.out_dir / "tokenizer.json").is_file()


@pytest.mark.parametrize("config", [QWEN2, LLAMA_MHA], ids=["qwen2", "llama-mha"])
def test_other_geometries_pass_too(tiny_model: TinyModel, tmp_path: Path, config: dict[str, Any]) -> None:
    record = quantize(
        make_request(tmp_path, tiny_model(config)), environment_python("autoawq"), log_path=tmp_path / "log"
    )
    assert record.quantized_modules.found == 14


def test_llm_compressor_writes_the_same_model_with_scales(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Heads that aren't shared: AWQ moves factors through v here, and KV scales from before that would not be v's any more."""
    recipe = RECIPE.model_copy(
        update={"backend": "llmcompressor", "calibrate_kv_scales": True, "clip_search": True}
    )
    request = make_request(tmp_path, tiny_model(LLAMA_MHA), recipe)
    record = quantize(request, environment_python("llmcompressor"), log_path=tmp_path / "quantize.log")
    assert (record.backend, record.format, record.bits) == ("llmcompressor", "compressed-tensors", 4)
    assert record.quantized_modules == ModuleCount(expected=14, found=14, missing=[])
    assert record.calibration.effective_tokens == 512
    assert 0.05 < record.effective_error.mean < record.effective_error.worst.value < 0.35
    assert record.kv_scales is not None and record.kv_scales.layers == 2
    assert record.versions["llmcompressor"] == "0.14.0.1"
    source, written = (
        json.loads((folder / "config.json").read_text()) for folder in (request.model_dir, request.out_dir)
    )
    assert written.pop("quantization_config")["kv_cache_scheme"]["num_bits"] == 8
    assert written == source
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (request.out_dir / name).read_bytes() == (request.model_dir / name).read_bytes()
    with pytest.raises(
        QuantgateError, match=r"k_scale is in the checkpoint, but the recipe calibrates no KV scales"
    ):
        plain = request.model_copy(
            update={"recipe": recipe.model_copy(update={"calibrate_kv_scales": False})}
        )
        run_module(
            environment_python("llmcompressor"),
            "pipeline.quantize.proof",
            plain.model_dump(mode="json"),
            tmp_path / "log",
        )


def test_llm_compressors_shipped_recipe_reaches_its_limits_on_the_demos_model(
    prepared_model: Path, tmp_path: Path
) -> None:
    """AutoAWQ's recipe is held to the same limits in the test of the whole graph. Without its cuts this one is at x1.17 and 0.77."""
    settings = load_settings(["profile=demo-full"], ROOT)
    autoawq, recipe = (settings.quantizers[scheme] for scheme in ("awq", "awq-lc-kv"))
    for limit in ("max_perplexity_ratio", "max_share_of_rounding_loss"):
        assert getattr(recipe, limit) == getattr(autoawq, limit)
    request = QuantizeRequest(
        scheme="awq-lc-kv",
        model_dir=prepared_model,
        out_dir=tmp_path / "out",
        calibration_file=ROOT / settings.calibration.file,
        heldout_file=ROOT / settings.calibration.heldout_file,
        recipe=recipe,
    )
    record = quantize(request, environment_python("llmcompressor"), log_path=tmp_path / "quantize.log")
    assert record.quantized_modules.found == 7 * 30
    assert record.perplexity.ratio < recipe.max_perplexity_ratio
    assert recipe.max_share_of_rounding_loss is not None
    assert (record.perplexity.share_of_rounding_loss or 1.0) < recipe.max_share_of_rounding_loss
    assert record.kv_scales is not None and record.kv_scales.layers == 30


def prove(request: QuantizeRequest, log: Path) -> dict[str, Any]:
    return run_module(
        environment_python("autoawq"), "pipeline.quantize.proof", request.model_dump(mode="json"), log
    )


def break_tensors(
    request: QuantizeRequest, folder: Path, change: Callable[[Tensors], None], **recipe: Any
) -> QuantizeRequest:
    """A copy of the sound checkpoint with `change` applied to its tensors."""
    from safetensors.numpy import load_file, save_file

    out = folder / "broken"
    shutil.copytree(request.out_dir, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return request.model_copy(update={"out_dir": out, "recipe": request.recipe.model_copy(update=recipe)})


def zero_scales(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.scales"][:] = 0


def one_nan_scale(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.scales"][0, 5] = np.nan


def shuffle_rows(tensors: Tensors) -> None:
    order = np.random.default_rng(0).permutation(128)
    tensors[f"{Q_PROJ}.qweight"] = np.ascontiguousarray(tensors[f"{Q_PROJ}.qweight"][order])


def swap_layers(tensors: Tensors) -> None:
    for part in ("qweight", "qzeros", "scales"):
        first, second = f"model.layers.0.mlp.up_proj.{part}", f"model.layers.1.mlp.up_proj.{part}"
        tensors[first], tensors[second] = tensors[second], tensors[first]


def lose_one_module(tensors: Tensors) -> None:
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{Q_PROJ}.{part}"]


def nan_in_a_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"][3] = np.inf


def other_embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (zero_scales, rf"{Q_PROJ}\.scales: 256 of 256 are zero or negative"),
        (one_nan_scale, rf"{Q_PROJ}\.scales: 1 of 256 are NaN or infinite"),
        (
            shuffle_rows,
            rf"1 of 14 modules have an effective weight error .* the worst is {Q_PROJ} with 1[0-9]{{2}}\.\d%",
        ),
        (swap_layers, r"the worst is model\.layers\.\d\.mlp\.(up|down)_proj"),
        (lose_one_module, rf"13 of 14 linear modules are quantized; the first missing is {Q_PROJ}"),
        (nan_in_a_norm, r"model\.norm\.weight: 1 of 128 values are NaN or infinite"),
        (other_embedding, r"model\.embed_tokens\.weight is not quantized, but differs"),
    ],
)
def test_broken_checkpoint_fails_the_proof(
    sound: tuple[QuantizeRequest, Quantization],
    tmp_path: Path,
    change: Callable[[Tensors], None],
    message: str,
) -> None:
    with pytest.raises(QuantgateError, match=message):
        prove(break_tensors(sound[0], tmp_path, change), tmp_path / "log")


def test_zero_quantized_layers_fail_the_proof(
    sound: tuple[QuantizeRequest, Quantization], tmp_path: Path
) -> None:
    """The original weights under a config that claims AWQ: an engine might even serve that."""
    request = sound[0]
    out = tmp_path / "claims-only"
    shutil.copytree(request.model_dir, out)
    shutil.copyfile(request.out_dir / "config.json", out / "config.json")
    with pytest.raises(QuantgateError, match="0 of 14 linear modules are quantized"):
        prove(request.model_copy(update={"out_dir": out}), tmp_path / "log")


def test_other_group_size_than_the_recipe_fails_the_proof(
    sound: tuple[QuantizeRequest, Quantization], tmp_path: Path
) -> None:
    request = sound[0]
    asked = request.model_copy(update={"recipe": request.recipe.model_copy(update={"group_size": 32})})
    with pytest.raises(
        QuantgateError, match=r"quantization_config\.group_size=64, but the recipe asks for 32"
    ):
        prove(asked, tmp_path / "log")


def test_perplexity_gate_stands_on_its_own(
    sound: tuple[QuantizeRequest, Quantization], tmp_path: Path
) -> None:
    """With the weight gate wide open the text alone must tell."""

    def quieter(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.scales", "down_proj.scales")):
                tensors[name] = tensor * np.float16(0.05)

    broken = break_tensors(sound[0], tmp_path, quieter, **WIDE_OPEN, max_perplexity_ratio=1.05)
    with pytest.raises(
        QuantgateError, match=r"perplexity on held-out text went from .* allows max_perplexity_ratio=1\.05"
    ):
        prove(broken, tmp_path / "log")


def test_defect_of_autoawq_on_a_cpu_is_caught(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the copied state AutoAWQ ruins the model silently; the stage fails and leaves no folder."""
    monkeypatch.setattr(autoawq, "BACKEND", replace(autoawq.BACKEND, module="tests.support.unsafe_autoawq"))
    with pytest.raises(QuantgateError, match="effective weight error"):
        quantize(
            make_request(tmp_path, tiny_model(LLAMA)),
            environment_python("autoawq"),
            log_path=tmp_path / "log",
        )
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_too_little_calibration_text_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    request = make_request(tmp_path, tiny_model(LLAMA))
    write_texts(request.calibration_file, ["Only a few words."])
    with pytest.raises(UserInputError, match="min_effective_tokens=512"):
        quantize(request, environment_python("autoawq"), log_path=tmp_path / "log")


def test_earlier_result_survives_a_failed_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    request = make_request(tmp_path, tiny_model(LLAMA))
    request.out_dir.mkdir()
    (request.out_dir / "earlier").write_text("result")
    with pytest.raises(EngineFailedError):
        quantize(request, environment_python("serve"), log_path=tmp_path / "log")  # AutoAWQ isn't in there
    assert (request.out_dir / "earlier").read_text() == "result"
