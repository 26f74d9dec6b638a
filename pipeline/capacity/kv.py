"""kappa: what one token's keys and values take, per layer and rank, for every KV-cache dtype that vLLM 0.32 has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.layers import Attention, LatentAttention
from pipeline.errors import UserInputError

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
"""Plain dtypes, one value per element (vLLM 0.32 config/cache.py, utils/torch_utils.py)."""

SCALE_BYTES = 4
"""One FP32 scale per token, head and side in the per-token-head dtypes (v1/attention/backends/triton_attn.py)."""

PER_TOKEN_HEAD_BITS = {"int4_per_token_head": 4, "int8_per_token_head": 8, "fp8_per_token_head": 8}

NVFP4 = ("nvfp4", "nvfp4_4over6")

TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""(key bits, value bits) (model_executor/layers/quantization/turboquant/config.py)."""

TURBOQUANT_BOUNDARY_LAYERS = 2
"""Layers at either end that a dense model keeps at 16 bits under TurboQuant (the same file, get_boundary_skip_layers)."""

MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes per token of the packed latent layouts (model_executor/layers/attention/mla_attention.py)."""

KV_CACHE_DTYPES = (*ELEMENT_BYTES, *PER_TOKEN_HEAD_BITS, *NVFP4, *TURBOQUANT_BITS, *MLA_BYTES)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token and layer of one rank. `boundary` holds for the first and last layers under TurboQuant, else equals `main`."""

    main: int
    boundary: int


def head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one KV head's key and value of one token."""
    if dtype in ELEMENT_BYTES:
        return 2 * head_dim * ELEMENT_BYTES[dtype]
    if dtype in PER_TOKEN_HEAD_BITS:
        return 2 * (head_dim * PER_TOKEN_HEAD_BITS[dtype] // 8 + SCALE_BYTES)
    if dtype in NVFP4:
        return 2 * (head_dim // 2 + head_dim // 16)  # FP4 data and one FP8 scale per 16 elements
    if dtype in TURBOQUANT_BITS:
        key_bits, value_bits = TURBOQUANT_BITS[dtype]
        key = (
            head_dim if key_bits == 8 else math.ceil(head_dim * key_bits / 8) + 2
        )  # indices and an FP16 norm
        slot = key + math.ceil(head_dim * value_bits / 8) + 4  # FP16 scale and zero
        return slot + slot % 2
    raise UserInputError(
        f"kv_cache_dtype is {dtype!r}; for attention with heads it is one of {', '.join(KV_CACHE_DTYPES)}"
    )


def token_bytes(mixer: Attention | LatentAttention, dtype: str, tensor_parallel: int = 1) -> TokenBytes:
    """Bytes per token of one layer and rank; KV heads are replicated where there are more ranks than heads."""
    if dtype not in KV_CACHE_DTYPES:
        raise UserInputError(f"kv_cache_dtype is {dtype!r}; allowed are {', '.join(KV_CACHE_DTYPES)}")
    if isinstance(mixer, LatentAttention):
        if dtype in MLA_BYTES:
            return TokenBytes(MLA_BYTES[dtype], MLA_BYTES[dtype])
        if dtype not in ELEMENT_BYTES:
            raise UserInputError(f"kv_cache_dtype is {dtype!r}, which latent attention doesn't have")
        width = mixer.latent_dim * ELEMENT_BYTES[dtype]  # every rank holds the whole latent
        return TokenBytes(width, width)
    if dtype in MLA_BYTES:
        raise UserInputError(f"kv_cache_dtype is {dtype!r}, which only latent attention has")
    heads = max(1, mixer.kv_heads // tensor_parallel)
    main = heads * head_bytes(dtype, mixer.head_dim)
    boundary = heads * head_bytes("bfloat16", mixer.head_dim) if dtype in TURBOQUANT_BITS else main
    return TokenBytes(main, boundary)


NONE_SKIPPED: frozenset[int] = frozenset()


def kappa_bytes(
    geometry: Geometry, dtype: str, tensor_parallel: int = 1, skipped: frozenset[int] = NONE_SKIPPED
) -> int:
    """KV bytes per token and rank over all layers, windows left out of account (a windowed layer stops growing).

    2 (K and V) * layers * KV heads per rank * head_dim * bytes per element for plain dtypes.
    """
    return sum(
        layer_token_bytes(geometry, index, dtype, tensor_parallel, skipped)
        for index, layer in enumerate(geometry.layers)
        if isinstance(layer.mixer, Attention | LatentAttention)
    )


def layer_token_bytes(
    geometry: Geometry,
    index: int,
    dtype: str,
    tensor_parallel: int = 1,
    skipped: frozenset[int] = NONE_SKIPPED,
) -> int:
    """Bytes per token of layer `index`, which must be an attention layer; those `skipped` keep 16 bits
    (--kv-cache-dtype-skip-layers, vLLM 0.32 layers/attention/attention.py)."""
    mixer = geometry.layers[index].mixer
    assert isinstance(mixer, Attention | LatentAttention)
    found = token_bytes(mixer, "bfloat16" if index in skipped else dtype, tensor_parallel)
    return found.boundary if is_boundary(geometry, index, dtype) else found.main


def is_boundary(geometry: Geometry, index: int, dtype: str) -> bool:
    """Whether TurboQuant leaves this layer at 16 bits: the outer ones of a model without recurrent layers."""
    if dtype not in TURBOQUANT_BITS or any(
        not isinstance(layer.mixer, Attention) for layer in geometry.layers
    ):
        return False
    count = len(geometry.layers)
    outer = min(TURBOQUANT_BOUNDARY_LAYERS, count // 2)
    return index < outer or index >= count - outer
