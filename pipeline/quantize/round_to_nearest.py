"""4-bit weights by plain rounding: what AWQ and GPTQ have to beat, at the same bits and group size, in the same run.

With zero points the formula is AutoAWQ's own (awq 0.2.9, quantizer.py, pseudo_quantize_tensor) without its scaling and clipping, so
what differs from the quantized model is the search alone; compressed-tensors' differs from it by less than 1 % of its loss.
Without, it is compressed-tensors' (0.19.0, quantization/utils/helpers.py, calculate_qparams).
"""

from __future__ import annotations

import torch


def round_to_nearest(
    weight: torch.Tensor, bits: int, group_size: int, zero_point: bool = True
) -> torch.Tensor:
    """`weight` (out, in) after rounding to `bits` with a scale and an integer zero point per group of inputs, in its own dtype.

    Scales are rounded to 16 bits, as a checkpoint stores them. Without a `zero_point` the steps lie around 0, one more below it
    than above.
    """
    groups = weight.float().reshape(-1, group_size)
    if not zero_point:
        middle = 2 ** (bits - 1)
        scales = (groups.abs().amax(1, keepdim=True).clamp(min=1e-5) / (middle - 0.5)).half().float()
        rounded = torch.round(groups / scales).clamp(-middle, middle - 1) * scales
        return rounded.reshape(weight.shape).to(weight.dtype)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    levels = 2**bits - 1
    scales = ((high - low).clamp(min=1e-5) / levels).half().float()
    return onto_steps(groups, low, scales, levels).reshape(weight.shape).to(weight.dtype)


def onto_steps(weight: torch.Tensor, low: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """`weight` on `levels` steps of `scales` from `low` up (broadcast), with an integer zero point, as AWQ stores it."""
    zeros = (-torch.round(low / scales)).clamp(0, levels)
    return ((torch.round(weight / scales) + zeros).clamp(0, levels) - zeros) * scales
