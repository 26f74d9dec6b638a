"""The packed layout against numbers worked out by hand, and every fault that a module can be refused for."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.awq_format import AwqLinear, pack_words, unpack_words


def test_nibbles_are_in_awq_order() -> None:
    # Column c of a word holds the value c. From the low nibble up the word reads columns 0 2 4 6 1 3 5 7.
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert unpack_words(word).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_packing_is_the_inverse_of_unpacking_also_with_the_top_bit_set() -> None:
    values = torch.randint(0, 16, (5, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    values[0, :8] = 15
    words = pack_words(values)
    assert words.dtype == torch.int32
    assert int(words[0, 0]) == -1
    assert torch.equal(unpack_words(words), values)


def sound_module(out_features: int = 16, in_features: int = 64, group_size: int = 32) -> AwqLinear:
    generator = torch.Generator().manual_seed(0)
    groups = in_features // group_size
    return AwqLinear(
        "layer",
        pack_words(torch.randint(0, 16, (in_features, out_features), generator=generator)),
        pack_words(torch.randint(0, 16, (groups, out_features), generator=generator)),
        (torch.rand((groups, out_features), generator=generator) + 0.1).to(torch.float16),
    )


def test_weight_is_value_minus_zero_times_scale() -> None:
    module = sound_module()
    weight = module.dequantize()
    assert weight.shape == (16, 64)
    for out_channel, in_channel in ((0, 0), (7, 31), (8, 32), (15, 63)):
        group = in_channel // 32
        value = int(unpack_words(module.qweight)[in_channel, out_channel])
        zero = int(unpack_words(module.qzeros)[group, out_channel])
        assert float(weight[out_channel, in_channel]) == (value - zero) * float(
            module.scales[group, out_channel]
        )


def test_sound_module_passes_and_knows_its_group_size() -> None:
    module = sound_module()
    module.check(16, 64, 32)
    assert module.group_size() == 32


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", 0.0, r"layer\.scales: 1 of 32 are zero or negative"),
        ("scales", float("nan"), r"layer\.scales: 1 of 32 are NaN or infinite"),
        ("scales", float("inf"), r"layer\.scales: 1 of 32 are NaN or infinite"),
    ],
)
def test_broken_scale_is_counted(part: str, value: float, message: str) -> None:
    module = sound_module()
    getattr(module, part)[1, 3] = value
    with pytest.raises(QuantgateError, match=message):
        module.check(16, 64, 32)


def test_other_group_size_than_asked_for_is_refused() -> None:
    with pytest.raises(
        QuantgateError, match=r"qzeros has shape \[2, 2\], but 4 bits at group size 64 make it \[1, 2\]"
    ):
        sound_module().check(16, 64, 64)


def test_transposed_weights_are_refused() -> None:
    with pytest.raises(QuantgateError, match=r"layer\.qweight has shape"):
        sound_module().check(64, 16, 16)
