"""Int4 layers as vLLM builds them from a checkpoint, AWQ or compressed-tensors, without an engine. Needs the serve environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

AWQ_ORDER = [
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
]  # which of eight outputs goes into which nibble (AutoAWQ, awq/modules/linear/gemm.py)


@dataclass(frozen=True)
class Int4Weights:
    """q [outputs, inputs] and zero points [groups, outputs] in 0..15, scales [groups, outputs] in the served dtype."""

    q: torch.Tensor
    points: torch.Tensor
    scales: torch.Tensor

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scales.shape[0]

    def float32(self) -> torch.Tensor:
        """The weights that the format means, [outputs, inputs]."""

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.float().t().repeat_interleave(self.group_size, dim=1)

        return (self.q.float() - spread(self.points)) * spread(self.scales)


def random_weights(
    outputs: int, inputs: int, group_size: int, *, symmetric: bool, dtype: torch.dtype, seed: int = 0
) -> Int4Weights:
    """Weights whose zero points sit anywhere in 0..15, the extremes included."""
    torch.manual_seed(seed)
    groups = inputs // group_size
    points = torch.full((groups, outputs), 8) if symmetric else torch.randint(0, 16, (groups, outputs))
    return Int4Weights(
        q=torch.randint(0, 16, (outputs, inputs)),
        points=points,
        scales=(torch.rand(groups, outputs) * 0.02 + 0.005).to(dtype),
    )


def pack(values: torch.Tensor) -> torch.Tensor:
    """[..., n] of 0..15 -> [..., n / 8] int32, the first in the lowest nibble."""
    nibbles = values.reshape(*values.shape[:-1], -1, 8).long() << torch.arange(0, 32, 4)
    total = nibbles.sum(dim=-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def pack_awq(values: torch.Tensor) -> torch.Tensor:
    """As AutoAWQ stores a row of outputs."""
    return pack(values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(values.shape))


@functools.cache
def _default_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@contextmanager
def vllm_config() -> Iterator[None]:
    """Parameters and kernel choice ask for the current config and the tensor-parallel rank."""
    from unittest.mock import patch

    from vllm.config import set_current_vllm_config
    from vllm.model_executor import parameter

    rank, size = "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"
    with (
        set_current_vllm_config(_default_config()),
        patch.object(parameter, rank, lambda: 0),
        patch.object(parameter, size, lambda: 1),
    ):
        yield


@dataclass(frozen=True)
class LoadedLayer:
    """A layer after loading: `module` holds the parameters, `kernel` is what the registry chose; call it with x."""

    module: torch.nn.Module
    kernel: Any
    apply: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)


def awq_layer(weights: Int4Weights, bias: torch.Tensor | None = None) -> LoadedLayer:
    """A layer of an AWQ checkpoint."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod

    outputs, inputs = weights.q.shape
    config = AutoAWQConfig(4, weights.group_size, True, False)
    layer = torch.nn.Module()
    layer.bias = None
    with vllm_config():
        method = AutoAWQMarlinLinearMethod(config)
        method.create_weights(
            layer, inputs, [outputs], inputs, outputs, weights.scales.dtype, weight_loader=None
        )
        layer.qweight.data = pack_awq(weights.q.t())
        layer.qzeros.data = pack_awq(weights.points)
        layer.scales.data = weights.scales.clone()
        method.process_weights_after_loading(layer)
    return LoadedLayer(layer, method.kernel, lambda x: method.apply(layer, x, bias))


def compressed_tensors_layer(weights: Int4Weights, *, symmetric: bool, group_size: int | None) -> LoadedLayer:
    """The same for a compressed-tensors checkpoint; `group_size` None: one group over all inputs."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    outputs, inputs = weights.q.shape
    layer = torch.nn.Module()
    layer.bias = None
    with vllm_config():
        scheme = CompressedTensorsWNA16(
            strategy="channel" if group_size is None else "group",
            num_bits=4,
            group_size=group_size,
            symmetric=symmetric,
        )
        scheme.create_weights(
            layer, outputs, inputs, [outputs], inputs, weights.scales.dtype, weight_loader=None
        )
        layer.weight_packed.data = pack(weights.q)
        layer.weight_scale.data = weights.scales.t().contiguous()
        if not symmetric:
            layer.weight_zero_point.data = pack(weights.points.contiguous()).t().contiguous()
        scheme.process_weights_after_loading(layer)
    return LoadedLayer(layer, scheme.kernel, lambda x: scheme.apply_weights(layer, x, None))
