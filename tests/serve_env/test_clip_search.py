"""The clip search against the errors of real outputs, token by token, and against AutoAWQ's own way of cutting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.clip_search import (
    EXPONENTS,
    SHRINKAGES,
    clip,
    fake_quantize,
    gram_matrices,
    search_scales,
    unscale,
)
from pipeline.quantize.round_to_nearest import round_to_nearest

GROUP, BITS, LEVELS = 32, 4, 15


def layer(seed: int, outputs: int = 24, inputs: int = 96, tokens: int = 500) -> tuple[Any, Any]:
    """Weights with outliers and correlated inputs of which some channels are loud, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight += 4 * (torch.rand(outputs, inputs, generator=generator) < 0.03) * weight.sign()
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    loud = torch.exp(torch.randn(inputs, generator=generator))
    return weight, (torch.randn(tokens, inputs, generator=generator) @ mix) * loud


def group_errors(weight: Any, rounded: Any, inputs: Any) -> Any:
    """Mean squared change of each group's share of each output, the slow way: (outputs, groups)."""
    change = (rounded - weight).reshape(len(weight), -1, GROUP)
    shares = torch.einsum("tgi,ogi->tog", inputs.reshape(len(inputs), -1, GROUP), change)
    return shares.square().mean(0)


def cut_like_autoawq(weight: Any, inputs: Any) -> Any:
    """awq 0.2.9, `_compute_best_clip`, written out: both ends at the same absolute value."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    limit = grouped.abs().amax(-1, keepdim=True)
    best, kept = torch.full_like(limit, float("inf")), limit.clone()
    for shrinkage in (0.0, *SHRINKAGES):
        cut = grouped.clamp(-limit * (1 - shrinkage), limit * (1 - shrinkage))
        rounded = fake_quantize(cut, cut.amin(-1, keepdim=True), cut.amax(-1, keepdim=True), LEVELS)
        found = group_errors(weight, rounded.reshape(weight.shape), inputs).unsqueeze(-1)
        kept = torch.where(found < best, limit * (1 - shrinkage), kept)
        best = torch.minimum(best, found)
    return grouped.clamp(-kept, kept).reshape(weight.shape)


def rounded(weight: Any) -> Any:
    grouped = weight.reshape(len(weight), -1, GROUP)
    return fake_quantize(
        grouped, grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True), LEVELS
    ).reshape(weight.shape)


def test_gram_matrix_gives_the_error_of_the_outputs() -> None:
    weight, inputs = layer(0)
    change = (rounded(weight) - weight).reshape(len(weight), -1, GROUP).transpose(0, 1)
    found = ((change @ gram_matrices(inputs, GROUP)) * change).sum(-1).t()
    assert torch.allclose(found, group_errors(weight, rounded(weight), inputs), rtol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_no_group_gets_worse_and_the_whole_beats_a_cut_at_one_absolute_value(seed: int) -> None:
    weight, inputs = layer(seed)
    cut = clip(weight, gram_matrices(inputs, GROUP), BITS)
    ours = group_errors(weight, rounded(cut), inputs)
    plain = group_errors(weight, rounded(weight), inputs)
    assert (ours <= plain * 1.001).all()
    theirs = group_errors(weight, rounded(cut_like_autoawq(weight, inputs)), inputs)
    assert ours.sum() < 0.97 * theirs.sum() < 0.97 * plain.sum()


def test_clipping_only_cuts_outliers() -> None:
    weight, inputs = layer(1)
    cut = clip(weight, gram_matrices(inputs, GROUP), BITS)
    same = cut == weight
    assert 0.8 < same.float().mean() < 1.0
    grouped, whole = cut.reshape(-1, GROUP), weight.reshape(-1, GROUP)
    ends = (cut.abs() < weight.abs()) | same
    assert ends.all()  # nothing grows
    assert (grouped.amax(1) >= 0.55 * whole.amax(1) - 1e-6).all()  # and nothing shrinks by more than 45 %


def test_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working on a few rows at a time is a matter of memory alone."""
    from pipeline.quantize import clip_search

    weight, inputs = layer(2)
    gram = gram_matrices(inputs, GROUP)
    whole = clip(weight, gram, BITS)
    monkeypatch.setattr(clip_search, "ROWS_BYTES", 4 * 96 * 5)
    assert torch.allclose(clip(weight, gram, BITS), whole)


def test_half_precision_stays_half() -> None:
    weight, inputs = layer(3)
    cut = clip(weight.half(), gram_matrices(inputs.half(), GROUP), BITS)
    assert cut.dtype == torch.float16
    assert (
        group_errors(weight, round_to_nearest(cut.float(), BITS, GROUP), inputs).sum()
        < group_errors(weight, round_to_nearest(weight, BITS, GROUP), inputs).sum()
    )


def test_scaled_inputs_need_no_second_look_at_the_tokens() -> None:
    _, inputs = layer(4)
    scales = torch.linspace(0.2, 5.0, inputs.shape[1])
    assert torch.allclose(
        unscale(gram_matrices(inputs, GROUP), scales), gram_matrices(inputs / scales, GROUP), rtol=1e-4
    )


@pytest.mark.parametrize("best", range(len(EXPONENTS)))
def test_the_search_for_scales_keeps_the_trial_that_loses_least(best: int) -> None:
    weight, inputs = layer(3)
    gram, mean_input = gram_matrices(inputs, GROUP), inputs.abs().mean(0)
    trials: list[list[Any]] = []

    def loss(trial: list[Any]) -> float:
        trials.append(trial)
        return float(len(trials) - 1 != best)

    scales = search_scales([weight, weight[:8]], mean_input, gram, BITS, loss)
    assert len(trials) == len(EXPONENTS) and all(len(trial) == 2 for trial in trials)
    # Up to one factor for all channels the scales are the mean input to the trial's power, and they are out of its weights again.
    ratio = scales / mean_input.pow(EXPONENTS[best])
    assert torch.allclose(ratio, ratio[0].expand_as(ratio))
    expected = round_to_nearest(clip(weight * scales, unscale(gram, scales), BITS), BITS, GROUP) / scales
    assert torch.equal(trials[best][0], expected)
    assert torch.equal(trials[best][1], expected[:8])


def test_scales_that_all_overflow_are_refused() -> None:
    weight, inputs = layer(4)
    with pytest.raises(QuantgateError, match="no scale gives a finite output"):
        search_scales(
            [weight],
            inputs.abs().mean(0),
            gram_matrices(inputs, GROUP),
            BITS,
            lambda _: float("nan"),
        )
