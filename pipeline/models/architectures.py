"""The decoder architectures that the quantizer and its proofs understand, as tensor names and shapes.

One table serves three readers: the shape check of a model folder, the list of modules that must come out
quantized, and the pairs of modules through which AWQ moves its scales. Names are those of the Hugging Face
checkpoints (transformers 4.51 and 5: models/{llama,mistral,qwen2,qwen3}/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserInputError

ATTENTION_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER_LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Geometry:
    """The sizes that decide every tensor's shape (all in elements)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    attention_bias: bool
    """Bias on q, k and v (always so in Qwen2)."""
    output_bias: bool
    """Bias on o (Llama's `attention_bias` puts it on all four)."""
    mlp_bias: bool
    qk_norm: bool


def geometry(config: Mapping[str, Any], where: str = "config.json") -> Geometry:
    """Read the geometry out of a Hugging Face config; `where` names the file in an error.

    Raises `UserInputError` for an unknown `model_type` and for a size that is missing or impossible.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserInputError(
            f"{where}: model_type={model_type!r} is not supported; allowed: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    heads = _size(config, "num_attention_heads", where)
    hidden = _size(config, "hidden_size", where)
    kv_heads = _size(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise UserInputError(
            f"{where}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads} evenly"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UserInputError(
            f"{where}: hidden_size={hidden} must be a multiple of num_attention_heads={heads}, or head_dim must be given"
        )
    llama_bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    return Geometry(
        model_type=model_type,
        layers=_size(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", where, default=hidden // heads),
        intermediate=_size(config, "intermediate_size", where),
        vocab=_size(config, "vocab_size", where),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=model_type == "qwen2" or llama_bias,
        output_bias=llama_bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
    )


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserInputError(f"{where}: {key}={value!r} must be a whole number of at least 1")
    return value


def linear_shape(sizes: Geometry, linear: str) -> tuple[int, int]:
    """Shape (out_features, in_features) of one of `LAYER_LINEARS`."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "self_attn.q_proj": (queries, sizes.hidden),
        "self_attn.k_proj": (keys, sizes.hidden),
        "self_attn.v_proj": (keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, queries),
        "mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }[linear]


def has_bias(sizes: Geometry, linear: str) -> bool:
    """Whether this linear layer carries a bias in the architecture."""
    if linear in MLP_LINEARS:
        return sizes.mlp_bias
    return sizes.output_bias if linear == "self_attn.o_proj" else sizes.attention_bias


def layer_name(layer: int) -> str:
    """Checkpoint prefix of one decoder layer, without the trailing dot."""
    return f"model.layers.{layer}"


def linear_modules(sizes: Geometry) -> list[str]:
    """Full names of every linear module that AWQ must quantize: all of them but the output head."""
    return [f"{layer_name(layer)}.{linear}" for layer in range(sizes.layers) for linear in LAYER_LINEARS]


def other_tensors(sizes: Geometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that stay unquantized: embeddings, norms, biases, output head."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    if not sizes.tied_embeddings:
        shapes["lm_head.weight"] = (sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        prefix = layer_name(layer)
        shapes[f"{prefix}.input_layernorm.weight"] = (sizes.hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (sizes.hidden,)
        if sizes.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (sizes.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (sizes.head_dim,)
        for linear in LAYER_LINEARS:
            if has_bias(sizes, linear):
                shapes[f"{prefix}.{linear}.bias"] = (linear_shape(sizes, linear)[0],)
    return shapes


def expected_shapes(sizes: Geometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the unquantized checkpoint."""
    shapes = other_tensors(sizes)
    for layer in range(sizes.layers):
        for linear in LAYER_LINEARS:
            shapes[f"{layer_name(layer)}.{linear}.weight"] = linear_shape(sizes, linear)
    return shapes
