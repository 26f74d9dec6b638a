"""FP8 weights and activations in plain torch against compressed-tensors' own rounding and the engine's, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize

from pipeline.errors import QuantgateError
from pipeline.quantize.float_format import FloatLinear, check_config, round_activations
from pipeline.settings.schema import QuantizeRecipe

OUT, IN = 24, 64
WEIGHT = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
SCALE = WEIGHT.abs().amax(dim=1, keepdim=True) / 448
RECIPE = QuantizeRecipe(
    backend="llmcompressor", method="fp8", bits=8, group_size=None, zero_point=False, clip_search=False
)
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def sound() -> FloatLinear:
    arguments = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    return FloatLinear("layer", quantize(WEIGHT, SCALE, None, arguments, torch.float8_e4m3fn), SCALE)


def test_what_the_library_rounds_is_read_back_within_the_formats_error() -> None:
    module = sound()
    module.check(OUT, IN, None)
    assert module.group_size() is None and module.zero_points() is None
    error = (module.dequantize() - WEIGHT).norm() / WEIGHT.norm()
    low, high = RECIPE.effective_error_range
    assert low < float(error) < high
    assert (module.dequantize() - WEIGHT).abs().max() <= (WEIGHT.abs() / 16 + SCALE * 2**-10).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.zeros_like(SCALE)}, r"weight_scale: 24 of 24 are zero or negative"),
        ({"scale": SCALE / 0}, r"weight_scale: 24 of 24 are NaN or infinite"),
        ({"scale": SCALE[:1]}, r"weight_scale has shape \[1, 1\], but 8 bits with a scale per output make it \[24, 1\]"),
        ({"scale": SCALE.bfloat16()}, r"weight_scale must be torch\.float32, found torch\.bfloat16"),
        ({"weight": WEIGHT}, r"weight must be torch\.float8_e4m3fn, found torch\.float32"),
        ({"weight": WEIGHT.t().to(torch.float8_e4m3fn)}, r"layer\.weight has shape \[64, 24\]"),
        # One scale for all: most outputs use a part of the range only, though every shape is right.
        ({"weight": (WEIGHT / 40).to(torch.float8_e4m3fn)}, r"24 of 24 outputs use less than half of the format's range"),
    ],
)  # fmt: skip
def test_broken_module_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(QuantgateError, match=message):
        replace(sound(), **change).check(OUT, IN, None)


def test_an_output_of_zeros_is_no_fault() -> None:
    weight = sound().weight.clone()
    weight[3] = 0
    replace(sound(), weight=weight).check(OUT, IN, None)


def test_activations_are_rounded_as_the_engine_rounds_them() -> None:
    """vLLM's own quantization of a dynamic token, in its plain torch form."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    tokens = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1.0, 300.0]
    ).view(2, 1, 1)
    tokens[0, 0, 7] = 90.0
    with set_current_vllm_config(VllmConfig()):
        engine = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
        values, scales = engine.forward_native(tokens.reshape(-1, IN))
    [ours] = round_activations(torch.nn.Identity(), (tokens,))
    assert torch.allclose(ours.reshape(-1, IN), values.float() * scales, rtol=1e-5, atol=1e-7)
    error = (ours - tokens).norm() / tokens.norm()
    assert 0.015 < float(error) < 0.03


def config(**changes: object) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    return {
        "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": group | changes.pop("group", {})},  # type: ignore[operator]
        "kv_cache_scheme": None,
    } | changes  # fmt: skip


def test_config_that_the_recipe_asks_for_passes() -> None:
    check_config(config(), RECIPE)
    check_config(config(kv_cache_scheme=KV_SCHEME), RECIPE.model_copy(update={"calibrate_kv_scales": True}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": {"input_activations": None}}, r"input_activations\.num_bits=None"),
        ({"group": {"weights": {"num_bits": 8, "type": "int"}}}, r"weights\.type='int'"),
        ({"format": "naive-quantized"}, r"quantization_config\.format='naive-quantized'"),
        ({"kv_cache_scheme": KV_SCHEME}, "an engine would take an FP8 KV cache"),
    ],
)
def test_other_config_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantgateError, match=message):
        check_config(config(**changes), RECIPE)
