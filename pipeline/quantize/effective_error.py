"""How far the quantized weights are from the original ones, with AWQ's scale folding undone.

AWQ multiplies the input channels of a layer by s and divides the producer of those channels by s, so the stored
weights differ from the original ones by design. What must stay is each composed function:

- norm then q/k/v, norm then gate/up: W diag(norm). The norms are stored in full precision, so the folding is
  known exactly.
- v then o, up then down: the producer's rows are divided by s and the consumer's columns multiplied by it. s is
  not stored anywhere; per row it is the least-squares factor between the original and the stored producer row.
  (Estimating one number from a row of hundreds of weights takes only their share of the error with it.)

The error of a module is ||W_effective - W||_F / ||W||_F. GPTQ and FP8 fold nothing: W_effective is what is stored, and every norm
and bias must be the original one (`plain_errors`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.errors import QuantgateError
from pipeline.models.architectures import LAYER_LINEARS, Geometry, attention, has_bias, layer_name

Fetch = Callable[[str], torch.Tensor]
"""Gives the float32 tensor of a name, e.g. `model.layers.0.self_attn.q_proj.weight`, shape (out, in)."""

# Which norm feeds which linear layers (the same in every supported architecture).
NORM_CONSUMERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
# Rounding of a norm, an embedding or a bias from fp32 through a 16-bit float is under 0.4 % (bfloat16, 8 bits).
UNQUANTIZED_TOLERANCE = 0.01


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted`; NaN anywhere gives NaN."""
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp(min=1e-30))


def layer_errors(layer: int, sizes: Geometry, original: Fetch, stored: Fetch) -> dict[str, float]:
    """Relative weight error of every linear module of one decoder layer, by full module name.

    Raises `QuantgateError` when a bias doesn't belong to the folded weights.
    """
    prefix = layer_name(layer)
    effective: dict[str, torch.Tensor] = {}
    for norm, consumers in NORM_CONSUMERS.items():
        name = f"{prefix}.{norm}.weight"
        # Where the original norm is 0 the channel is dead in both, and any factor will do.
        before, after = original(name), stored(name)
        factor = torch.where(before == 0, torch.zeros_like(after), after / before)
        for linear in consumers:
            effective[linear] = stored(f"{prefix}.{linear}.weight") * factor
    row_factors = {
        "self_attn.v_proj": _row_factors(
            original(f"{prefix}.self_attn.v_proj.weight"), effective["self_attn.v_proj"]
        ),
        "mlp.up_proj": _row_factors(original(f"{prefix}.mlp.up_proj.weight"), effective["mlp.up_proj"]),
    }
    for linear, factors in row_factors.items():
        effective[linear] = effective[linear] * factors.unsqueeze(1)
    heads = _share_among_queries(row_factors["self_attn.v_proj"], sizes)
    effective["self_attn.o_proj"] = stored(f"{prefix}.self_attn.o_proj.weight") / heads
    effective["mlp.down_proj"] = stored(f"{prefix}.mlp.down_proj.weight") / row_factors["mlp.up_proj"]
    for linear in LAYER_LINEARS:
        if has_bias(sizes, linear):
            factors = row_factors.get(linear)
            found = stored(f"{prefix}.{linear}.bias") * (1.0 if factors is None else factors)
            _check_unquantized(
                f"{prefix}.{linear}.bias",
                found,
                original(f"{prefix}.{linear}.bias"),
                slack=factors is not None,
            )
    return {
        f"{prefix}.{linear}": relative_error(effective[linear], original(f"{prefix}.{linear}.weight"))
        for linear in LAYER_LINEARS
    }


def plain_errors(layer: int, original: Fetch, stored: Fetch) -> dict[str, float]:
    """Relative weight error of every linear module of one decoder layer that nothing was folded into, by full module name."""
    modules = [f"{layer_name(layer)}.{linear}" for linear in LAYER_LINEARS]
    return {
        module: relative_error(stored(f"{module}.weight"), original(f"{module}.weight")) for module in modules
    }


def check_unfolded_tensors(names: list[str], original: Fetch, stored: Fetch, *, folds: bool) -> None:
    """Embeddings, output head, last norm and q/k norms are never scaled: they must be the original ones.

    Nor are the other norms and the biases where the method `folds` no scales into them.
    """
    for name in names:
        folded = name.endswith((".bias", "input_layernorm.weight", "post_attention_layernorm.weight"))
        if not (folds and folded):
            _check_unquantized(name, stored(name), original(name), slack=False)


def _check_unquantized(name: str, found: torch.Tensor, wanted: torch.Tensor, *, slack: bool) -> None:
    # A bias whose scale was only estimated carries the estimate's noise.
    tolerance = 10 * UNQUANTIZED_TOLERANCE if slack else UNQUANTIZED_TOLERANCE
    error = relative_error(found, wanted)
    if not error <= tolerance:
        raise QuantgateError(f"{name} is not quantized, but differs from the original by {error:.1%}")


def _row_factors(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Per row the factor s that minimizes ||wanted - s * found||, shape (rows,); 1 for a row of zeros."""
    energy = found.square().sum(dim=1)
    factors = (wanted * found).sum(dim=1) / energy.clamp(min=1e-30)
    usable = (energy > 0) & (factors > 0)
    return torch.where(usable, factors, torch.ones_like(factors))


def _share_among_queries(factors: torch.Tensor, sizes: Geometry) -> torch.Tensor:
    """Expand factors of v's rows (kv_heads * head_dim) to o's columns (heads * head_dim), as attention shares them."""
    shape = attention(sizes)
    per_head = factors.reshape(shape.kv_heads, shape.head_dim)
    return per_head.repeat_interleave(shape.heads // shape.kv_heads, dim=0).reshape(-1)
