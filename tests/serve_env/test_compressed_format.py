"""compressed-tensors' packed layout against that library's own packing, and every fault that a module can be refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from pipeline.errors import QuantgateError
from pipeline.quantize.compressed_format import CompressedLinear, check_config, packed, unpack_rows
from pipeline.quantize.round_to_nearest import round_to_nearest
from pipeline.settings.schema import QuantizeRecipe

OUT, IN, GROUP = 24, 64, 32
GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randint(-8, 8, (OUT, IN), generator=GENERATOR, dtype=torch.int8)
ZERO = torch.randint(-8, 8, (OUT, IN // GROUP), generator=GENERATOR, dtype=torch.int8)
SCALE = torch.rand((OUT, IN // GROUP), generator=GENERATOR) + 0.1
RECIPE = QuantizeRecipe(backend="llmcompressor", group_size=32, clip_search=False)
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def sound() -> CompressedLinear:
    return CompressedLinear(
        "layer",
        pack_to_int32(Q, 4),
        SCALE.bfloat16(),
        torch.tensor([OUT, IN]),
        pack_to_int32(ZERO, 4, packed_dim=0).contiguous(),
    )


def test_the_lowest_bits_hold_the_first_value() -> None:
    assert unpack_rows(torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack_rows(torch.tensor([[-1]], dtype=torch.int32)).tolist() == [[15] * 8]


def test_weight_is_value_minus_zero_times_scale() -> None:
    zeros, scales = (x.float().repeat_interleave(GROUP, dim=1) for x in (ZERO, SCALE.bfloat16()))
    module = sound()
    module.check(OUT, IN, GROUP)
    assert module.group_size() == GROUP
    assert torch.equal(module.dequantize(), (Q.float() - zeros) * scales)
    points = module.zero_points()
    assert points is not None and torch.equal(points.to(torch.int8), ZERO + 8)


def test_without_zero_points_the_steps_lie_around_zero() -> None:
    module = replace(sound(), zero_point=None)
    module.check(OUT, IN, GROUP)
    assert module.zero_points() is None
    scales = SCALE.bfloat16().float().repeat_interleave(GROUP, dim=1)
    assert torch.equal(module.dequantize(), Q.float() * scales)
    tensors = {
        "a.weight_packed": module.weight,
        "a.weight_scale": module.scale,
        "a.weight_shape": module.shape,
    }
    assert packed("a", tensors.__getitem__, tensors).zero_point is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.zeros_like(SCALE)}, r"weight_scale: 48 of 48 are zero or negative"),
        ({"scale": SCALE / 0}, r"weight_scale: 48 of 48 are NaN or infinite"),
        ({"scale": SCALE[:, :1]}, r"weight_scale has shape \[24, 1\], but 4 bits at group size 32 make it \[24, 2\]"),
        ({"weight": pack_to_int32(Q.t().contiguous(), 4)}, r"layer\.weight_packed has shape"),
        ({"shape": torch.tensor([IN, OUT])}, r"weight_shape says \[64, 24\], the architecture \[24, 64\]"),
        ({"zero_point": ZERO[:3]}, r"weight_zero_point must be int32"),
    ],
)  # fmt: skip
def test_broken_module_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(QuantgateError, match=message):
        replace(sound(), **change).check(OUT, IN, GROUP)


def test_plain_rounding_without_zero_points_is_the_librarys() -> None:
    """What GPTQ without zero points is compared with: compressed-tensors' own scales and rounding of the same weights."""
    weight = torch.randn(OUT, IN, generator=GENERATOR)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    groups = weight.reshape(OUT, -1, GROUP)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    theirs = fake_quantize(weight, scale.half().float(), zero, arguments)
    assert torch.equal(round_to_nearest(weight, 4, GROUP, zero_point=False), theirs)


def config(**changes: object) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    } | changes  # fmt: skip


def test_config_that_the_recipe_asks_for_passes() -> None:
    check_config(config(), RECIPE)
    calibrated = RECIPE.model_copy(update={"calibrate_kv_scales": True})
    check_config(config(kv_cache_scheme=KV_SCHEME), calibrated)
    check_config(
        config(config_groups={}, kv_cache_scheme=KV_SCHEME),
        calibrated.model_copy(update={"bits": 16, "group_size": None}),
    )


@pytest.mark.parametrize(
    ("changes", "recipe", "message"),
    [
        ({}, {"group_size": 64}, r"weights\.group_size=32, but the recipe asks for 64"),
        ({}, {"method": "gptq", "zero_point": False}, r"weights\.symmetric=False, but the recipe asks for True"),
        ({"format": "marlin-24"}, {}, r"quantization_config\.format='marlin-24'"),
        ({"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]}, {}, r"ignore="),
        ({"config_groups": {}}, {}, "0 config_groups, the recipe makes one"),
        ({"kv_cache_scheme": KV_SCHEME}, {}, "an engine would take an FP8 KV cache"),
        ({}, {"calibrate_kv_scales": True}, r"kv_cache_scheme\.num_bits=None"),
        (
            {"kv_cache_scheme": {**KV_SCHEME, "strategy": "attn_head"}},
            {"calibrate_kv_scales": True},
            r"kv_cache_scheme\.strategy='attn_head'",
        ),
        ({"kv_cache_scheme": KV_SCHEME}, {"calibrate_kv_scales": True, "bits": 16}, "leaves the weights as they are"),
    ],
)  # fmt: skip
def test_other_config_is_refused_by_key(
    changes: dict[str, object], recipe: dict[str, object], message: str
) -> None:
    with pytest.raises(QuantgateError, match=message):
        check_config(config(**changes), RECIPE.model_copy(update=recipe))
