"""4-bit weights by plain rounding: what AWQ has to beat, at the same bits and group size, in the same run.

The formula is AutoAWQ's own (awq 0.2.9, quantizer.py, pseudo_quantize_tensor) without its scaling and clipping, so what
differs from the quantized model is the search alone.
"""

from __future__ import annotations

import torch


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """`weight` (out, in) after rounding to `bits` with a scale and an integer zero point per group of inputs, in its own dtype.

    Scales are rounded to 16 bits, as a checkpoint stores them.
    """
    groups = weight.float().reshape(-1, group_size)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    levels = 2**bits - 1
    scales = ((high - low).clamp(min=1e-5) / levels).half().float()
    return onto_steps(groups, low, scales, levels).reshape(weight.shape).to(weight.dtype)


def onto_steps(weight: torch.Tensor, low: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """`weight` on `levels` steps of `scales` from `low` up (broadcast), with an integer zero point, as AWQ stores it."""
    zeros = (-torch.round(low / scales)).clamp(0, levels)
    return ((torch.round(weight / scales) + zeros).clamp(0, levels) - zeros) * scales
