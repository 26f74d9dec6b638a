"""The int4 kernel against float32, on layers that vLLM itself builds from AWQ and compressed-tensors parameters."""

import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from pipeline.serving.cpu_plugin import register
from pipeline.serving.cpu_plugin.int4_linear import Int4PackLinearKernel, operator_group
from tests.support.int4_layers import awq_layer, compressed_tensors_layer, random_weights

# The bound of the issue; float16 keeps three more bits of every number than bfloat16.
TOLERANCE = {torch.bfloat16: 0.005, torch.float16: 0.005 / 8}
# (outputs, inputs, group): SmolLM2-135M's fused QKV, output, gate/up and down layers, then every group that the operator takes,
# a layer that is one block wide, and a Qwen2.5-7B-like KV projection.
SHAPES = [
    (960, 576, 64),
    (576, 576, 64),
    (3072, 576, 32),
    (576, 1536, 128),
    (256, 512, 256),
    (16, 64, 32),
    (512, 3584, 128),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Our kernel in the registry, and out of it again."""
    kernels = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, list(kernels))
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "")
    register.register_int4_linear()


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.float() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_awq_layer_matches_float32(outputs, inputs, group, dtype):
    weights = random_weights(outputs, inputs, group, symmetric=False, dtype=dtype)
    layer = awq_layer(weights)
    assert isinstance(layer.kernel, Int4PackLinearKernel)
    for rows in (1, 5, 64):
        x = (torch.randn(rows, inputs) + 0.5).to(dtype)  # an offset shows errors in the zero points
        assert relative_error(layer(x), x.float() @ weights.float32().T) < TOLERANCE[dtype]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 512, None])
def test_compressed_tensors_layer_matches_float32(symmetric, group):
    inputs = 512
    weights = random_weights(96, inputs, group or inputs, symmetric=symmetric, dtype=torch.bfloat16)
    layer = compressed_tensors_layer(weights, symmetric=symmetric, group_size=group)
    assert isinstance(layer.kernel, Int4PackLinearKernel)
    x = (torch.randn(7, inputs) + 0.5).bfloat16()
    assert relative_error(layer(x), x.float() @ weights.float32().T) < TOLERANCE[torch.bfloat16]


def test_each_weight_lands_in_its_place():
    """One-hot inputs read single weights back: a permutation that a norm could hide would show."""
    weights = random_weights(64, 128, 32, symmetric=False, dtype=torch.bfloat16)
    layer = awq_layer(weights)
    read = layer(torch.eye(128, dtype=torch.bfloat16)).float().T
    step = float(weights.scales.max())
    assert (
        float((read - weights.float32()).abs().max()) < 0.1 * step
    )  # BF16 holds 15 steps to within 1/17 of one


def test_bias_and_leading_dimensions():
    weights = random_weights(32, 64, 32, symmetric=False, dtype=torch.bfloat16)
    bias = torch.linspace(-5, 5, 32).bfloat16()
    wide = torch.randn(2, 3, 128).bfloat16()
    x = wide[..., ::2]  # not contiguous
    y = awq_layer(weights, bias)(x)
    assert y.shape == (2, 3, 32)
    assert relative_error(y, x.float() @ weights.float32().T + bias.float()) < TOLERANCE[torch.bfloat16]


def test_packed_size_is_half_a_byte_per_weight():
    weights = random_weights(64, 128, 32, symmetric=False, dtype=torch.bfloat16)
    layer = awq_layer(weights)
    packed, _, points = layer.kernel._get_weight_params(layer.module)
    assert packed.numel() * packed.itemsize == 64 * 128 // 2
    assert points is None


@pytest.mark.parametrize(
    ("group_size", "inputs", "expected"),
    [
        (64, 576, 64),
        (128, 1536, 128),
        (512, 1024, 256),
        (96, 576, 32),
        (-1, 576, 64),
        (16, 64, None),
        (40, 80, None),
    ],
)
def test_operator_group(group_size, inputs, expected):
    assert operator_group(group_size, inputs) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_size": 16}, "group size 16"),
        ({"partition_weight_shape": (576, 24)}, "24 outputs"),
        ({"act_type": torch.float32}, "float32"),
        ({"zero_points": False}, "uint4"),
        ({"weight_type": scalar_types.uint8b128}, "uint8b128"),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_the_reason(change, reason):
    fits = {
        "full_weight_shape": (576, 64),
        "partition_weight_shape": (576, 64),
        "weight_type": scalar_types.uint4,
        "act_type": torch.bfloat16,
        "group_size": 64,
        "zero_points": True,
    }
    assert Int4PackLinearKernel.can_implement(MPLinearLayerConfig(**fits)) == (True, None)
    able, why = Int4PackLinearKernel.can_implement(MPLinearLayerConfig(**(fits | change)))
    assert not able
    assert reason in why
