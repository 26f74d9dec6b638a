"""The whole proof on a checkpoint that is merely rounded and packed here: no quantizer, every gate, and the record's figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import QuantgateError
from pipeline.models.architectures import geometry, linear_modules
from pipeline.models.normalize import normalize_folder
from pipeline.quantize.awq_format import pack_words
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.checkpoint import Checkpoint
from pipeline.quantize.proof import prove
from pipeline.quantize.round_to_nearest import round_to_nearest
from pipeline.settings.schema import QuantizeRecipe
from tests.support.checkpoint_configs import quantization_config
from tests.support.tiny_models import LLAMA, prose, write_model, write_texts

GROUP = 64
Tensors = dict[str, Any]


def pack(weight: Any) -> Tensors:
    """AWQ's layout of a weight (out, in) that is rounded to nearest, step by step as `round_to_nearest` does it."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low).clamp(min=1e-5) / 15).half()
    zeros = (-torch.round(low / scales.float())).clamp(0, 15)
    values = (torch.round(groups / scales.float()) + zeros).clamp(0, 15).reshape(weight.shape)
    return {
        "qweight": pack_words(values.t().contiguous()),
        "qzeros": pack_words(zeros.squeeze(-1).t().contiguous()),
        "scales": scales.squeeze(-1).t().contiguous(),
    }


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> QuantizeRequest:
    """A tiny Llama and its rounded checkpoint."""
    folder = tmp_path_factory.mktemp("proof")
    model, out = write_model(folder / "model", LLAMA), folder / "out"
    normalize_folder(model)
    shutil.copytree(model, out)
    tensors = load_file(model / "model.safetensors")
    for module in linear_modules(geometry(LLAMA)):
        weight = tensors.pop(f"{module}.weight")
        packed = pack(weight)
        tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    written = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": written}))
    return QuantizeRequest(
        scheme="awq",
        model_dir=model,
        out_dir=out,
        calibration_file=write_texts(folder / "calibration.jsonl", prose(5, seed=1)),
        heldout_file=write_texts(folder / "heldout.jsonl", prose(10, seed=2)),
        recipe=QuantizeRecipe(group_size=GROUP, clip_search=False, max_perplexity_ratio=2.0),
    )


FP8 = {
    "backend": "llmcompressor", "method": "fp8", "bits": 8, "group_size": None, "zero_point": False,
    "effective_error_range": (0.018, 0.030), "layer_error_range": (0.022, 0.028),
}  # fmt: skip


@pytest.fixture(scope="module")
def fp8(request_: QuantizeRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantizeRequest:
    """The same model's FP8 checkpoint."""
    out = tmp_path_factory.mktemp("fp8") / "out"
    shutil.copytree(request_.model_dir, out)
    tensors = load_file(out / "model.safetensors")
    for module in linear_modules(geometry(LLAMA)):
        weight = tensors[f"{module}.weight"]
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        tensors |= {
            f"{module}.weight": (weight / scale).to(torch.float8_e4m3fn),
            f"{module}.weight_scale": scale,
        }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    recipe = request_.recipe.model_copy(update=FP8)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization_config(recipe)})
    )
    return request_.model_copy(update={"out_dir": out, "recipe": recipe})


def test_record_of_an_fp8_checkpoint(fp8: QuantizeRequest) -> None:
    found = proven(fp8)
    assert (found["bits"], found["group_size"], found["zero_point"]) == (8, None, None)
    assert (found["format"], found["activations"]) == ("compressed-tensors", "float8_e4m3fn")
    assert found["quantized_modules"] == {"expected": 14, "found": 14, "missing": []}
    assert (
        0.022
        < min(found["effective_error"]["per_layer"])
        < found["effective_error"]["worst"]["value"]
        < 0.030
    )
    assert found["perplexity"]["round_to_nearest"] is None
    # Its perplexity is with rounded activations: weights alone, as an engine would not run them, come to another.
    with ExitStack() as stack:
        plain = Checkpoint(fp8.out_dir, stack)
        weights_only = {name: plain(name) for name in plain.names() if not name.endswith("weight_scale")}
    dequantized = fp8.out_dir.with_name("dequantized")
    shutil.copytree(fp8.model_dir, dequantized)
    save_file(weights_only, dequantized / "model.safetensors", metadata={"format": "pt"})
    again = proven(
        fp8.model_copy(update={"model_dir": dequantized}),
        effective_error_range=(0.0, 0.5),
        layer_error_range=(0.0, 0.5),
    )
    assert again["perplexity"]["original"] != pytest.approx(found["perplexity"]["quantized"], rel=1e-5)
    assert again["perplexity"]["quantized"] == pytest.approx(found["perplexity"]["quantized"], rel=1e-3)


def test_faults_of_an_fp8_checkpoint_are_refused(fp8: QuantizeRequest, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"

    def poison(tensors: Tensors) -> None:
        weight = tensors[f"{name}.weight"].float()
        weight[0, 0] = float("nan")
        tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)

    def louder(tensors: Tensors) -> None:
        tensors[f"{name}.weight_scale"] *= 1.05

    def norm(tensors: Tensors) -> None:
        tensors["model.layers.0.input_layernorm.weight"] *= 1.1

    for number, (change, message) in enumerate(
        [
            (poison, rf"{name}\.weight: 1 of \d+ values are NaN"),
            (
                louder,
                rf"1 of 14 modules have an effective weight error outside 2% to 3%; the worst is {name}",
            ),
            (norm, r"input_layernorm\.weight is not quantized, but differs from the original by 10"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(QuantgateError, match=message):
            proven(changed(fp8, tmp_path / str(number), change))


def proven(request: QuantizeRequest, **recipe: Any) -> dict[str, Any]:
    changed = request.recipe.model_copy(update=recipe)
    evidence: dict[str, Any] = prove(request.model_copy(update={"recipe": changed}).model_dump(mode="json"))[
        "evidence"
    ]
    return evidence


def changed(request: QuantizeRequest, folder: Path, change: Callable[[Tensors], None]) -> QuantizeRequest:
    """A copy of the checkpoint with `change` applied to its tensors."""
    shutil.copytree(request.out_dir, folder / "changed")
    tensors = load_file(folder / "changed/model.safetensors")
    change(tensors)
    save_file(tensors, folder / "changed/model.safetensors", metadata={"format": "pt"})
    return request.model_copy(update={"out_dir": folder / "changed"})


def test_record_of_a_rounded_checkpoint(request_: QuantizeRequest) -> None:
    found = proven(request_)
    assert (found["bits"], found["group_size"], found["zero_point"], found["format"]) == (
        4,
        GROUP,
        True,
        "awq",
    )
    assert found["quantized_modules"] == {"expected": 14, "found": 14, "missing": []}
    assert found["unquantized_modules"] == {
        "model.embed_tokens": "float32",
        "lm_head": "shares model.embed_tokens",
    }
    error = found["effective_error"]
    assert error["worst_layer"]["value"] == max(error["per_layer"]) < 0.20
    assert error["layer_range"] == [0.05, 0.20] and min(error["per_layer"]) > 0.05
    # The comparator is computed from the original's weights and must come to what is in this checkpoint.
    assert found["perplexity"]["ratio"] == pytest.approx(found["perplexity"]["round_to_nearest"], abs=2e-4)


def test_rounding_here_is_the_comparators(request_: QuantizeRequest) -> None:
    weight = load_file(request_.model_dir / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    from pipeline.quantize.awq_format import AwqLinear

    packed = AwqLinear("up", **pack(weight)).dequantize()
    assert torch.allclose(packed, round_to_nearest(weight, 4, GROUP), atol=1e-6)


def test_a_layer_out_of_range_is_named(request_: QuantizeRequest, tmp_path: Path) -> None:
    """A half more in every module of a layer: within the modules' range as opened here, but no layer is so bad."""

    def louder(tensors: Tensors) -> None:
        for name in tensors:
            if name.startswith("model.layers.1.") and name.endswith("scales"):
                tensors[name] *= 1.25

    broken = changed(request_, tmp_path, louder)
    with pytest.raises(
        QuantgateError, match=r"1 of 2 layers have a mean .* the worst is layer 1 with \d\d\.\d%"
    ):
        proven(broken, effective_error_range=(0.0, 0.99))


def test_an_embedding_of_another_model_is_refused(request_: QuantizeRequest, tmp_path: Path) -> None:
    def other(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, dims=0)

    with pytest.raises(QuantgateError, match=r"embed_tokens\.weight is not quantized, but differs"):
        proven(changed(request_, tmp_path, other))


def test_a_missing_module_is_counted(request_: QuantizeRequest, tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"model.layers.0.mlp.down_proj.{part}"]

    with pytest.raises(
        QuantgateError, match=r"13 of 14 linear modules are quantized; the first missing is .*down_proj"
    ):
        proven(changed(request_, tmp_path, lose))


def test_the_comparator_tells_a_worse_rounding_apart(request_: QuantizeRequest, tmp_path: Path) -> None:
    """A search gone wrong: plain rounding would have been better."""

    def noisier(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if name.endswith("scales"):
                tensors[name] = (
                    tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator)).clamp(min=0.1)
                ).half()

    broken = changed(request_, tmp_path, noisier)
    found = proven(
        broken, effective_error_range=(0.0, 0.99), layer_error_range=(0.0, 0.99), max_perplexity_ratio=10.0
    )
    assert found["perplexity"]["ratio"] > 1.01 * found["perplexity"]["round_to_nearest"]
