"""The decoder architectures that the quantizer and its proofs understand, as tensor names and shapes.

One table serves three readers: the shape check of a model folder, the list of modules that must come out
quantized, and the pairs of modules through which AWQ moves its scales. Sizes are the capacity planner's `Geometry`; names are
those of the Hugging Face checkpoints (transformers 4.51 and 5: models/{llama,mistral,qwen2,qwen3}/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import Attention, FeedForward, Linear
from pipeline.errors import UserInputError

ATTENTION_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER_LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)
SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def geometry(config: Mapping[str, Any], where: str = "config.json") -> Geometry:
    """Read the geometry out of a Hugging Face config; `where` names the file in an error.

    Raises `UserInputError` for an architecture whose tensors aren't known here and for a size that is missing or impossible.
    """
    found = Geometry.from_config(config, where)
    if found.architecture not in SUPPORTED:
        raise UserInputError(
            f"{where}: architectures is {found.architecture!r}, which isn't quantized here; allowed are {', '.join(SUPPORTED)}"
        )
    return found


def attention(sizes: Geometry) -> Attention:
    """The attention that all layers of a supported model share."""
    mixer = sizes.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def intermediate(sizes: Geometry) -> int:
    """Width of the MLP that all layers of a supported model share."""
    mlp = sizes.layers[0].feed_forward
    assert isinstance(mlp, FeedForward)
    return mlp.intermediate


def _linear(sizes: Geometry, name: str) -> Linear:
    return next(linear for linear in sizes.layers[0].linears(sizes.hidden) if linear.name == name)


def linear_shape(sizes: Geometry, linear: str) -> tuple[int, int]:
    """Shape (out_features, in_features) of one of `LAYER_LINEARS`."""
    return _linear(sizes, linear).shape


def has_bias(sizes: Geometry, linear: str) -> bool:
    """Whether this linear layer carries a bias in the architecture."""
    return _linear(sizes, linear).bias


def layer_name(layer: int) -> str:
    """Checkpoint prefix of one decoder layer, without the trailing dot."""
    return f"model.layers.{layer}"


def linear_modules(sizes: Geometry) -> list[str]:
    """Full names of every linear module that AWQ must quantize: all of them but the output head."""
    return [f"{layer_name(layer)}.{linear}" for layer in range(len(sizes.layers)) for linear in LAYER_LINEARS]


def other_tensors(sizes: Geometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that stay unquantized: embeddings, norms, biases, output head."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    if not sizes.tied_embeddings:
        shapes["lm_head.weight"] = (sizes.vocabulary, sizes.hidden)
    shared = attention(sizes)
    for layer in range(len(sizes.layers)):
        prefix = layer_name(layer)
        shapes[f"{prefix}.input_layernorm.weight"] = (sizes.hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (sizes.hidden,)
        if shared.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (shared.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (shared.head_dim,)
        for linear in LAYER_LINEARS:
            if has_bias(sizes, linear):
                shapes[f"{prefix}.{linear}.bias"] = (linear_shape(sizes, linear)[0],)
    return shapes


def expected_shapes(sizes: Geometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the unquantized checkpoint."""
    shapes = other_tensors(sizes)
    for layer in range(len(sizes.layers)):
        for linear in LAYER_LINEARS:
            shapes[f"{layer_name(layer)}.{linear}.weight"] = linear_shape(sizes, linear)
    return shapes
