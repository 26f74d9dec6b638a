"""The proof's own judgements, with numbers worked out by hand: rounding, layers, and what AWQ must save of rounding's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.proof import against_rounding, check_layers
from pipeline.quantize.round_to_nearest import round_to_nearest
from pipeline.settings.schema import QuantizeRecipe


def recipe(**changes: Any) -> QuantizeRecipe:
    return QuantizeRecipe(group_size=64, **changes)


def test_rounding_keeps_what_16_levels_can_hold() -> None:
    """Levels -7 to 8 times 1/4 with a zero point of 7: exact in 4 bits, and exact in 16-bit scales."""
    weight = ((torch.arange(64) % 16) - 7).float().repeat(3, 1) / 4
    assert torch.equal(round_to_nearest(weight, 4, 64), weight)


def test_rounding_is_within_half_a_step_of_its_group() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 10.0]
    ).repeat_interleave(64)
    error = (round_to_nearest(weight, 4, 64) - weight).reshape(8, 2, 64).abs().amax(-1)
    groups = weight.reshape(8, 2, 64)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    # The zero point is rounded too, which may clip one end of the range by another half step.
    assert (error <= 1.01 * step).all() and (error >= 0.25 * step).all()


def test_smaller_groups_and_more_bits_lose_less() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    errors = [
        float((round_to_nearest(weight, bits, group) - weight).norm())
        for bits, group in ((4, 128), (4, 32), (8, 32))
    ]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1.1 * errors[1] > 10 * errors[2]


def test_layers_within_the_range_pass_and_the_farthest_out_is_named() -> None:
    check_layers([0.05, 0.11, 0.20], (0.05, 0.20))
    for errors, said in (
        ([0.1, 0.21, 0.3], r"2 of 3 layers .* outside 5% to 20%; the worst is layer 2 with 30\.0%"),
        ([0.1, 0.01], r"1 of 2 layers .* the worst is layer 1 with 1\.0%"),
    ):
        with pytest.raises(QuantgateError, match=said):
            check_layers(errors, (0.05, 0.20))


def test_share_of_roundings_loss_is_a_gate() -> None:
    found = against_rounding(1.16, 1.34, recipe(max_share_of_rounding_loss=0.5))
    assert found["round_to_nearest"] == 1.34
    assert found["share_of_rounding_loss"] == pytest.approx(0.4706)
    with pytest.raises(QuantgateError, match=r"59% of that loss, .* max_share_of_rounding_loss=0\.5"):
        against_rounding(1.20, 1.34, recipe(max_share_of_rounding_loss=0.5))
    with pytest.raises(QuantgateError, match="118% of that loss"):
        against_rounding(1.40, 1.34, recipe(max_share_of_rounding_loss=1.0))
    assert against_rounding(1.40, 1.34, recipe())["share_of_rounding_loss"] > 1


def test_share_is_not_computed_where_rounding_loses_next_to_nothing() -> None:
    for rounded in (None, 1.004, 0.99, float("inf"), float("nan")):
        assert against_rounding(1.5, rounded, recipe())["share_of_rounding_loss"] is None
