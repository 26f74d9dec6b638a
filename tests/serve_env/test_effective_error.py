"""Scale folding is undone exactly, and what remains is the rounding: nothing less and nothing more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.errors import QuantgateError
from pipeline.models.architectures import Geometry, attention, geometry, intermediate
from pipeline.quantize.effective_error import (
    check_unfolded_tensors,
    layer_errors,
    plain_errors,
    relative_error,
)
from tests.support.tiny_models import LLAMA, LLAMA_MHA, QWEN2, random_weights

Tensors = dict[str, Any]
PREFIX = "model.layers.0."


def tensors(config: dict[str, Any]) -> Tensors:
    return {name: torch.from_numpy(value.copy()) for name, value in random_weights(config).items()}


def round_to_groups(weight: Any, group_size: int = 32) -> Any:
    """Plain 4-bit asymmetric round-to-nearest, written out."""
    grouped = weight.reshape(weight.shape[0], -1, group_size)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (high - low) / 15
    return (torch.round((grouped - low) / step) * step + low).reshape(weight.shape)


def fold(weights: Tensors, sizes: Geometry, seed: int = 0) -> Tensors:
    """What AWQ's scaling does to one layer without any rounding: channels times s, their producers over s."""
    folded = {name: value.clone() for name, value in weights.items()}
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Any:
        return torch.exp(0.5 * torch.randn(count, generator=generator))

    for norm, consumers in (("input_layernorm", "qkv"), ("post_attention_layernorm", ("gate", "up"))):
        s = factors(sizes.hidden)
        folded[f"{PREFIX}{norm}.weight"] /= s
        for name in consumers:
            group = "self_attn" if norm == "input_layernorm" else "mlp"
            folded[f"{PREFIX}{group}.{name}_proj.weight"] *= s
    s = factors(intermediate(sizes))
    folded[f"{PREFIX}mlp.up_proj.weight"] /= s.unsqueeze(1)
    folded[f"{PREFIX}mlp.down_proj.weight"] *= s
    if attention(sizes).heads == attention(sizes).kv_heads:
        s = factors(attention(sizes).heads * attention(sizes).head_dim)
        folded[f"{PREFIX}self_attn.v_proj.weight"] /= s.unsqueeze(1)
        folded[f"{PREFIX}self_attn.o_proj.weight"] *= s
    return folded


def round_linears(weights: Tensors) -> Tensors:
    return {
        name: round_to_groups(value) if "_proj.weight" in name else value for name, value in weights.items()
    }


def errors_of(
    config: dict[str, Any], change: Callable[[Tensors], None] | None = None, fold_it: bool = True
) -> dict[str, float]:
    sizes = geometry(config)
    original = tensors(config)
    stored = round_linears(
        fold(original, sizes) if fold_it else {name: value.clone() for name, value in original.items()}
    )
    if change is not None:
        change(stored)
    return layer_errors(0, sizes, original.__getitem__, stored.__getitem__)


@pytest.mark.parametrize("config", [LLAMA, LLAMA_MHA, QWEN2], ids=["gqa", "mha", "qwen2"])
def test_folding_without_rounding_leaves_no_error(config: dict[str, Any]) -> None:
    sizes = geometry(config)
    original = tensors(config)
    errors = layer_errors(0, sizes, original.__getitem__, fold(original, sizes).__getitem__)
    assert len(errors) == 7
    assert max(errors.values()) < 1e-5


def test_rounding_without_folding_is_the_plain_error() -> None:
    original = tensors(LLAMA)
    name = PREFIX + "self_attn.q_proj"
    wanted = relative_error(round_to_groups(original[name + ".weight"]), original[name + ".weight"])
    assert errors_of(LLAMA, fold_it=False)[name] == pytest.approx(wanted, rel=1e-5)


def test_estimated_row_factors_hide_next_to_nothing_of_the_error() -> None:
    original = tensors(LLAMA)
    name = PREFIX + "mlp.up_proj"
    wanted = relative_error(round_to_groups(original[name + ".weight"]), original[name + ".weight"])
    assert errors_of(LLAMA, fold_it=False)[name] == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("config", [LLAMA, LLAMA_MHA, QWEN2], ids=["gqa", "mha", "qwen2"])
def test_folding_and_rounding_stay_in_the_range_of_a_sound_checkpoint(config: dict[str, Any]) -> None:
    assert all(0.02 < error < 0.35 for error in errors_of(config).values())


def test_shuffled_rows_are_seen_in_their_module() -> None:
    name = PREFIX + "self_attn.o_proj"

    def shuffle(stored: Tensors) -> None:
        stored[name + ".weight"] = stored[name + ".weight"].roll(1, dims=0)

    errors = errors_of(LLAMA, shuffle)
    assert errors.pop(name) > 1.0
    assert max(errors.values()) < 0.35


def test_forgotten_norm_scale_is_seen() -> None:
    def forget(stored: Tensors) -> None:
        stored[PREFIX + "input_layernorm.weight"] = tensors(LLAMA)[PREFIX + "input_layernorm.weight"]

    errors = errors_of(LLAMA, forget)
    assert errors[PREFIX + "self_attn.q_proj"] > 0.5
    assert errors[PREFIX + "mlp.gate_proj"] < 0.35


def test_nan_is_an_error_of_nan() -> None:
    def poison(stored: Tensors) -> None:
        stored[PREFIX + "mlp.gate_proj.weight"][0, 0] = float("nan")

    assert math.isnan(errors_of(LLAMA, poison)[PREFIX + "mlp.gate_proj"])


def test_changed_bias_is_refused() -> None:
    def change(stored: Tensors) -> None:
        stored[PREFIX + "self_attn.k_proj.bias"] *= 1.1

    with pytest.raises(
        QuantgateError, match=r"self_attn\.k_proj\.bias is not quantized, but differs .* 10\.0%"
    ):
        errors_of(QWEN2, change)


def test_changed_embedding_is_refused() -> None:
    original = tensors(LLAMA)
    stored = {**original, "model.embed_tokens.weight": original["model.embed_tokens.weight"].roll(1, dims=0)}
    with pytest.raises(QuantgateError, match=r"model\.embed_tokens\.weight is not quantized"):
        check_unfolded_tensors(
            ["model.embed_tokens.weight"], original.__getitem__, stored.__getitem__, folds=True
        )


def test_what_folds_nothing_is_compared_as_it_is() -> None:
    """The same fold that AWQ is forgiven: GPTQ and FP8 have no reason for it, so it is the error that it is."""
    original, sizes = tensors(QWEN2), geometry(QWEN2)
    rounded, folded = round_linears(original), fold(original, sizes)
    for name, error in plain_errors(0, original.__getitem__, rounded.__getitem__).items():
        assert error == relative_error(rounded[f"{name}.weight"], original[f"{name}.weight"])
    assert max(plain_errors(0, original.__getitem__, folded.__getitem__).values()) > 0.2
    norm = PREFIX + "input_layernorm.weight"
    check_unfolded_tensors([norm], original.__getitem__, folded.__getitem__, folds=True)
    with pytest.raises(QuantgateError, match=rf"{norm} is not quantized, but differs"):
        check_unfolded_tensors([norm], original.__getitem__, folded.__getitem__, folds=False)
