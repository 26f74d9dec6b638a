"""The proof of KV scales: what is missing, impossible or implausible is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.errors import QuantgateError
from pipeline.models.architectures import geometry
from pipeline.quantize.kv_scales import FP8_MAX, Coverage, LayerScales, read_scales
from pipeline.settings.schema import QuantizeRecipe
from tests.support.tiny_models import LLAMA

RECIPE = QuantizeRecipe(backend="llmcompressor", clip_search=False, calibrate_kv_scales=True)
NAMES = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]


def stored(**changes: float | torch.Tensor | None) -> Any:
    """A checkpoint's scales: 0.5 each, but for `changes` by name with dots as double underscores; None: missing."""
    tensors = {name: torch.tensor([0.5]) for name in NAMES}
    for key, value in changes.items():
        tensors[key.replace("__", ".")] = None if value is None else torch.as_tensor(value)  # type: ignore[assignment]
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return SimpleNamespace(names=lambda: set(kept), raw=kept.__getitem__)


FIRST = "model__layers__0__self_attn__k_scale"


def test_sound_scales_are_read_by_layer() -> None:
    found = read_scales(stored(**{FIRST: 0.25}), geometry(LLAMA), RECIPE)
    assert found == {0: LayerScales(0.25, 0.5), 1: LayerScales(0.5, 0.5)}
    plain = RECIPE.model_copy(update={"calibrate_kv_scales": False})
    assert (
        read_scales(
            stored(**dict.fromkeys(name.replace(".", "__") for name in NAMES)), geometry(LLAMA), plain
        )
        == {}
    )


@pytest.mark.parametrize(
    ("changes", "recipe", "message"),
    [
        ({FIRST: None}, {}, r"1 of 4 KV scales are missing; the first is model\.layers\.0\.self_attn\.k_scale"),
        ({FIRST: 0.0}, {}, r"k_scale is 0\.0; a scale must be a positive number"),
        ({FIRST: float("nan")}, {}, "k_scale is nan"),
        ({FIRST: float("inf")}, {}, "k_scale is inf"),
        ({FIRST: torch.ones(3)}, {}, r"k_scale has shape \[3\]"),
        ({"model__layers__7__self_attn__k_scale": 1.0}, {}, r"layers\.7\.self_attn\.k_scale belongs to no layer"),
        ({}, {"calibrate_kv_scales": False}, "the recipe calibrates no KV scales"),
    ],
)  # fmt: skip
def test_broken_scales_are_named(changes: dict[str, Any], recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantgateError, match=message):
        read_scales(stored(**changes), geometry(LLAMA), RECIPE.model_copy(update=recipe))


def cache(largest: float) -> Any:
    """Keys and values of one layer whose largest magnitude is given."""
    tensor = torch.linspace(-largest, largest / 2, 1000).view(1, 2, 10, 50)
    return SimpleNamespace(layers=[SimpleNamespace(keys=tensor, values=tensor / 2)])


def test_coverage_is_counted_over_all_passes() -> None:
    coverage = Coverage({0: LayerScales(0.5, 0.25)})
    for largest in (FP8_MAX / 4, FP8_MAX / 2):
        coverage.take(cache(largest))
    found = coverage.evidence()["kv_scales"]
    assert found["coverage"] == [1.0, 1.0]
    assert (found["largest_key"], found["largest_value"]) == (FP8_MAX / 2, FP8_MAX / 4)
    assert found["saturated"]["share"] == 0.0


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (LayerScales(0.2, 0.25), r"k_scale covers 0\.40 times the largest value"),
        (LayerScales(0.5, 1.0), r"v_scale covers 4\.00 times"),
        (LayerScales(0.45, 0.25), r"k_scale: [\d.]+% of the values on held-out text saturate"),
    ],
)
def test_implausible_scale_fails(scales: LayerScales, message: str) -> None:
    coverage = Coverage({0: scales})
    coverage.take(cache(FP8_MAX / 2))
    with pytest.raises(QuantgateError, match=message):
        coverage.evidence()
