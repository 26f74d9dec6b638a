"""Int4 linear layers (AWQ, and compressed-tensors' int4) on PyTorch's own int4 product for CPUs.

`aten::_weight_int4pack_mm_for_cpu` computes x @ w.T with w = (q - 8) * scale + zero, one scale and zero per group of inputs
(PyTorch 2.13, aten/src/ATen/native/LinearAlgebra.cpp and cpu/int4mm_kernel.cpp). A checkpoint's w = (q - z) * scale is the
same with zero = (8 - z) * scale, rounded to the activations' dtype: 0.25 % of the product's norm in BF16.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

# What the operator accepts; a larger group is several of these that share a scale.
OPERATOR_GROUPS = (256, 128, 64, 32)
MIDDLE = 8


def operator_group(group_size: int, inputs: int) -> int | None:
    """The largest group of the operator that divides the layer's group (-1: one group over all inputs), None if none does."""
    group = inputs if group_size == -1 else group_size
    return next((size for size in OPERATOR_GROUPS if group % size == 0), None)


class Int4PackLinearKernel(MPLinearKernel):
    """vLLM's mixed-precision kernel interface over the operator."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether a layer fits: (True, None) or (False, why not)."""
        inputs, outputs = c.partition_weight_shape
        symmetric, asymmetric = scalar_types.uint4b8, scalar_types.uint4
        if not current_platform.is_cpu():
            return False, "it is for CPUs"
        if c.weight_type != (asymmetric if c.zero_points else symmetric):
            return (
                False,
                f"{c.weight_type} with zero_points={c.zero_points} isn't a 4-bit format that it knows",
            )
        if c.act_type not in (torch.bfloat16, torch.float16):
            return False, f"activations are {c.act_type}, not bfloat16 or float16"
        if operator_group(c.group_size, inputs) is None or inputs % max(c.group_size, 1):
            return (
                False,
                f"group size {c.group_size} of {inputs} inputs isn't a multiple of 32 that divides them",
            )
        if outputs % 16:
            return False, f"{outputs} outputs aren't a multiple of 16"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack the layer's parameters for the operator.

        In: weights int4 packed along the inputs, [inputs / 8, outputs] or [outputs, inputs / 8]; scales [groups, outputs] or
        its transpose; zero points packed along the outputs. Which one, each parameter's `output_dim` says.
        Out: weights uint8 [outputs, inputs / 2] in the operator's own order, and (scale, zero) as [groups, outputs, 2].
        """
        config = self.config
        dtype = config.act_type
        packed = getattr(layer, self.w_q_name)
        q = _outputs_first(
            packed, unpack_quantized_values_into_int32(packed.data, config.weight_type, packed.packed_dim)
        )
        scale_param = getattr(layer, self.w_s_name)
        scales = _outputs_first(scale_param, scale_param.data).to(dtype)
        if config.zero_points:
            zero_param = getattr(layer, self.w_zp_name)
            points = _outputs_first(
                zero_param,
                unpack_quantized_values_into_int32(
                    zero_param.data, config.weight_type, zero_param.packed_dim
                ),
            )
            zeros = ((MIDDLE - points).float() * scales.float()).to(dtype)
        else:
            zeros = torch.zeros_like(scales)
        inputs = q.shape[1]
        self.group = operator_group(config.group_size, inputs)
        repeats = inputs // self.group // scales.shape[1]
        grouped = torch.stack([scales, zeros], dim=-1).repeat_interleave(repeats, dim=1)
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.contiguous(), 1)
        replace_parameter(layer, self.w_q_name, torch.nn.Parameter(weight, requires_grad=False))
        replace_parameter(
            layer,
            self.w_s_name,
            torch.nn.Parameter(grouped.transpose(0, 1).contiguous(), requires_grad=False),
        )
        if self.w_zp_name is not None and hasattr(layer, self.w_zp_name):
            setattr(layer, self.w_zp_name, None)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs], same dtype."""
        weight, grouped, _ = self._get_weight_params(layer)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, self.group, grouped)
        if bias is not None:
            y = y + bias
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _outputs_first(parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    return values if parameter.output_dim == 0 else values.t()
