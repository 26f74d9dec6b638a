"""Where to cut a group's outliers before it is rounded, by the error of the layer's output, at a cost that tokens don't drive.

Rounding a group of weights w (one output, `group_size` inputs) to q changes the output by (q - w) x for an input x. Its mean
square over all tokens is (q - w)' H (q - w) with the group's Gram matrix H = mean of x x', so the tokens are looked at once
and every trial costs group_size products per weight. AutoAWQ (awq 0.2.9, quantizer.py, `_compute_best_clip`) measures the
same error on 512 of the tokens, token by token, which on two cores takes most of the time of a quantization.

AutoAWQ also cuts both ends of a group at the same absolute value. With a zero point a group's range needn't be centred, so
here each end is searched on its own, the upper one first: the 10 shrinkages from 0 to 45 % that AutoAWQ tries.

AWQ's scales are searched for the weights that clipping leaves, in either backend: scales chosen for weights that nobody clips
widen the groups that clipping then cuts. On the 135M model AutoAWQ ends at a perplexity of x1.132 that way, with the joint search
at x1.089 (llm-compressor: x1.091), and with clipping and no scales at x1.093.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipeline.errors import QuantgateError
from pipeline.quantize.round_to_nearest import onto_steps, round_to_nearest

EXPONENTS = (0.0, 0.15, 0.3, 0.45, 0.6)
"""Powers of the mean input that are tried as scales, from none at all: each takes a clip search."""

SHRINKAGES = tuple(step / 20 for step in range(1, 10))
"""awq 0.2.9, `_compute_best_clip`: n_grid 20, max_shrink 0.5."""
ROUNDS = 1
"""Turns at both ends. Measured on three matrices of the 135M model: the first takes 29 to 35 % of the outputs' error, a second
another point for twice the time, a third under a tenth of one."""
ROWS_BYTES = 256 * 1024**2
"""Weights worked on at once, in bytes of fp32."""


def gram_matrices(inputs: torch.Tensor, group_size: int) -> torch.Tensor:
    """Mean outer product of each group's inputs, (groups, group_size, group_size) in fp32, from inputs (tokens, channels)."""
    groups = inputs.float().reshape(len(inputs), -1, group_size).permute(1, 2, 0)
    return groups @ groups.transpose(1, 2) / len(inputs)


def unscale(gram: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`gram` of inputs that are divided by `scales` (channels,), as AWQ divides them where it multiplies the weights."""
    by_group = scales.float().reshape(gram.shape[0], -1)
    return gram / (by_group.unsqueeze(1) * by_group.unsqueeze(2))


def fake_quantize(weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, levels: int) -> torch.Tensor:
    """`weight` rounded onto `levels` steps between `low` and `high` (broadcast)."""
    return onto_steps(weight, low, (high - low).clamp(min=1e-5) / levels, levels)


def clip(weight: torch.Tensor, gram: torch.Tensor, bits: int) -> torch.Tensor:
    """`weight` (out, in) with every group cut to the range whose rounding changes the output least.

    `gram` is `gram_matrices` of the layer's inputs. Rounding the result to its own range gives that rounding (in groups of both
    signs; where all weights have one, llm-compressor widens the range to 0 and AutoAWQ cuts what is beyond).
    """
    groups, group_size, _ = gram.shape
    step = max(1, ROWS_BYTES // (4 * groups * group_size))
    return torch.cat([_clip_rows(rows, gram, 2**bits - 1) for rows in weight.split(step)])


def _clip_rows(weight: torch.Tensor, gram: torch.Tensor, levels: int) -> torch.Tensor:
    groups, group_size, _ = gram.shape
    grouped = weight.float().reshape(-1, groups, group_size).transpose(0, 1)  # (groups, out, group_size)

    def error(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        change = fake_quantize(grouped.clamp(low, high), low, high, levels) - grouped
        return ((change @ gram) * change).sum(-1, keepdim=True)

    ends = [grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)]
    full, best = list(ends), error(*ends)
    for turn in range(2 * ROUNDS):
        end = 1 - turn % 2  # the upper one first; which is arbitrary
        for shrinkage in (0.0, *SHRINKAGES):
            trial = list(ends)
            trial[end] = full[end] * (1 - shrinkage)
            found = error(*trial)
            better = found < best
            best = torch.where(better, found, best)
            ends[end] = torch.where(better, trial[end], ends[end])
    return grouped.clamp(*ends).transpose(0, 1).reshape(weight.shape).to(weight.dtype)


def search_scales(
    weights: Sequence[torch.Tensor],
    mean_input: torch.Tensor,
    gram: torch.Tensor,
    bits: int,
    loss: Callable[[list[torch.Tensor]], float],
) -> torch.Tensor:
    """The scales (channels,) in fp32 whose *clipped* and rounded weights lose least.

    `weights` (out, channels) share their input, `mean_input` (channels,) is its mean magnitude and `gram` its `gram_matrices`.
    `loss` is told each trial's weights, as they act on inputs that nothing has scaled. Raises `QuantgateError` when no trial's
    loss is finite.
    """
    group_size = gram.shape[-1]
    best, least = None, float("inf")
    for exponent in EXPONENTS:
        scales = mean_input.float().pow(exponent).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        scaled_gram = unscale(gram, scales)
        trial = [
            round_to_nearest(clip(weight * scales.to(weight), scaled_gram, bits), bits, group_size)
            / scales.to(weight)
            for weight in weights
        ]
        found = loss(trial)
        if found < least:
            best, least = scales, found
    if best is None:
        raise QuantgateError("AWQ: no scale gives a finite output; the model overflows its dtype")
    return best
