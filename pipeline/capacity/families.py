"""From config.json to layers, one reader per architecture. Defaults are those of transformers 5 (models/*/configuration_*.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline.capacity.geometry import Geometry, Images, Reader
from pipeline.capacity.layers import Attention, FeedForward, LatentAttention, Layer, Mixer, Recurrent
from pipeline.errors import UserInputError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read(config: Reader) -> Geometry:
    """Geometry of a modelled architecture; `UserInputError` names the others."""
    architecture = config.architecture
    if architecture not in FAMILIES:
        raise UserInputError(
            f"{config.where}: architectures is {architecture!r}; its KV layout isn't modelled, allowed are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture](config)


def _geometry(
    config: Reader,
    layers: list[Layer],
    *,
    tied: bool = False,
    architecture: str | None = None,
    whole: bool = True,
) -> Geometry:
    return Geometry(
        architecture=architecture or config.architecture,
        model_type=str(config.get("model_type") or ""),
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        max_position=config.size("max_position_embeddings"),
        layers=tuple(layers),
        computable_weights=whole,
    )


def _heads(config: Reader, kv_default: int | None = None) -> tuple[int, int, int]:
    """(heads, KV heads, head_dim), checked against each other."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", kv_default or heads)
    if heads % kv_heads:
        raise config.refuse(
            "num_key_value_heads", f"is {kv_heads}, which doesn't divide num_attention_heads {heads}"
        )
    if config.has("head_dim"):
        return heads, kv_heads, config.size("head_dim")
    hidden = config.size("hidden_size")
    if hidden % heads:
        raise config.refuse(
            "hidden_size",
            f"is {hidden}, no multiple of num_attention_heads {heads}, and head_dim isn't given",
        )
    return heads, kv_heads, hidden // heads


def _repeat(config: Reader, mixer: Mixer, feed_forward: FeedForward, norms: int = 2) -> list[Layer]:
    layer = Layer(mixer, feed_forward, norms * config.size("hidden_size"))
    return [layer] * config.size("num_hidden_layers")


def _llama(config: Reader) -> Geometry:
    heads, kv_heads, head_dim = _heads(config)
    bias = config.flag("attention_bias")
    mixer = Attention(heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    return _geometry(
        config, _repeat(config, mixer, FeedForward(config.size("intermediate_size"), config.flag("mlp_bias")))
    )


def _mistral(config: Reader) -> Geometry:
    heads, kv_heads, head_dim = _heads(config, kv_default=8)
    window = config.size("sliding_window") if config.has("sliding_window") else None
    mixer = Attention(heads, kv_heads, head_dim, window)
    return _geometry(config, _repeat(config, mixer, FeedForward(config.size("intermediate_size"))))


def _no_window(config: Reader) -> None:
    """Qwen carries a sliding_window that is off; switched on it covers only part of the layers, in a way that vLLM refuses."""
    if config.flag("use_sliding_window"):
        raise config.refuse("use_sliding_window", "is true; its sliding-window layers aren't modelled")


def _qwen2(config: Reader) -> Geometry:
    _no_window(config)
    heads, kv_heads, head_dim = _heads(config)
    mixer = Attention(heads, kv_heads, head_dim, bias=True)
    return _geometry(config, _repeat(config, mixer, FeedForward(config.size("intermediate_size"))))


def _qwen3(config: Reader) -> Geometry:
    _no_window(config)
    heads, kv_heads, head_dim = _heads(config)
    bias = config.flag("attention_bias")
    mixer = Attention(heads, kv_heads, head_dim, bias=bias, output_bias=bias, qk_norm=True)
    return _geometry(config, _repeat(config, mixer, FeedForward(config.size("intermediate_size"))))


def _mixtral(config: Reader) -> Geometry:
    heads, kv_heads, head_dim = _heads(config, kv_default=8)
    window = config.size("sliding_window") if config.has("sliding_window") else None
    experts = FeedForward(
        config.size("intermediate_size"),
        experts=config.size("num_local_experts"),
        taken=config.size("num_experts_per_tok", 2),
    )
    return _geometry(config, _repeat(config, Attention(heads, kv_heads, head_dim, window), experts))


def _qwen3_moe(config: Reader) -> Geometry:
    _no_window(config)
    if config.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise config.refuse(
            "mlp_only_layers", "or decoder_sparse_step mixes dense and expert layers, which isn't modelled"
        )
    heads, kv_heads, head_dim = _heads(config)
    experts = FeedForward(
        config.size("moe_intermediate_size"),
        experts=config.size("num_experts"),
        taken=config.size("num_experts_per_tok", 8),
    )
    return _geometry(config, _repeat(config, Attention(heads, kv_heads, head_dim, qk_norm=True), experts))


def _windowed(config: Reader, kinds: tuple[str, ...], window: int, base: Attention) -> list[Attention]:
    """One attention per layer: sliding where `kinds` says so."""
    shape = (base.heads, base.kv_heads, base.head_dim)
    sliding = Attention(*shape, window, base.bias, base.output_bias, base.qk_norm, base.sinks)
    return [sliding if kind == SLIDING else base for kind in kinds]


def _layer_kinds(config: Reader, every: int, first_full: int) -> tuple[str, ...]:
    """layer_types where the config has them, else full attention at layers `first_full`, `first_full` + `every`, …"""
    count = config.size("num_hidden_layers")
    if config.has("layer_types"):
        return config.kinds("layer_types", count, (FULL, SLIDING))
    return tuple(FULL if layer % every == first_full else SLIDING for layer in range(count))


def _gemma2(config: Reader) -> Geometry:
    heads, kv_heads, head_dim = _heads(config)
    mixers = _windowed(
        config,
        _layer_kinds(config, 2, 1),
        config.size("sliding_window", 4096),
        Attention(heads, kv_heads, head_dim),
    )
    mlp, norms = FeedForward(config.size("intermediate_size")), 4 * config.size("hidden_size")
    return _geometry(config, [Layer(mixer, mlp, norms) for mixer in mixers], tied=True)


def _gemma3_text(config: Reader, architecture: str | None = None, whole: bool = True) -> Geometry:
    heads, kv_heads, head_dim = _heads(config)
    every = config.size("sliding_window_pattern", 6)
    base = Attention(heads, kv_heads, head_dim, qk_norm=True)
    mixers = _windowed(
        config, _layer_kinds(config, every, every - 1), config.size("sliding_window", 4096), base
    )
    mlp, norms = FeedForward(config.size("intermediate_size")), 4 * config.size("hidden_size")
    return _geometry(
        config,
        [Layer(mixer, mlp, norms) for mixer in mixers],
        tied=True,
        architecture=architecture,
        whole=whole,
    )


def _gemma3(config: Reader) -> Geometry:
    """The multimodal checkpoints: the decoder under text_config, beside a vision tower that holds no KV."""
    vision = config.get("vision_config")
    size = Reader(vision, f"{config.where}: vision_config").size("image_size", 896) if vision else 896
    images = Images(config.size("mm_tokens_per_image", 256), 3 * size * size)
    return replace(_gemma3_text(config.inner("text_config"), config.architecture, whole=False), images=images)


def _gpt_oss(config: Reader) -> Geometry:
    """Its MXFP4 experts run in kernels without workspaces: none is `taken`."""
    heads, kv_heads, head_dim = _heads(config)
    base = Attention(heads, kv_heads, head_dim, bias=True, output_bias=True, sinks=True)
    mixers = _windowed(config, _layer_kinds(config, 2, 1), config.size("sliding_window"), base)
    experts = FeedForward(
        config.size("intermediate_size"),
        bias=True,
        experts=config.size("num_local_experts"),
        router_bias=True,
    )
    norms = 2 * config.size("hidden_size")
    return _geometry(config, [Layer(mixer, experts, norms) for mixer in mixers])


def _deepseek(config: Reader) -> Geometry:
    if config.has("index_topk"):
        raise config.refuse("index_topk", "is set; the sparse attention's indexer cache isn't modelled")
    mixer = LatentAttention(
        heads=config.size("num_attention_heads"),
        kv_rank=config.size("kv_lora_rank"),
        rope_dim=config.size("qk_rope_head_dim"),
        nope_dim=config.size("qk_nope_head_dim"),
        value_dim=config.size("v_head_dim"),
        query_rank=config.size("q_lora_rank") if config.has("q_lora_rank") else None,
    )
    dense = FeedForward(config.size("intermediate_size"))
    layers, norms = config.size("num_hidden_layers"), 2 * config.size("hidden_size")
    if not config.has("n_routed_experts"):
        return _geometry(config, [Layer(mixer, dense, norms)] * layers)
    if config.size("moe_layer_freq", 1) != 1:
        raise config.refuse("moe_layer_freq", "is above 1, which isn't modelled")
    width = config.size("moe_intermediate_size")
    experts = FeedForward(
        width,
        experts=config.size("n_routed_experts"),
        shared_intermediate=width * int(config.get("n_shared_experts") or 0),
        taken=config.size("num_experts_per_tok", 6),
    )
    first = int(config.get("first_k_dense_replace") or 0)
    return _geometry(config, [Layer(mixer, dense if i < first else experts, norms) for i in range(layers)])


def _qwen3_next(config: Reader) -> Geometry:
    """Three gated delta networks to one gated attention; experts everywhere (transformers models/qwen3_next)."""
    if config.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise config.refuse(
            "mlp_only_layers", "or decoder_sparse_step mixes dense and expert layers, which isn't modelled"
        )
    count, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    every = config.size("full_attention_interval", 4)
    if config.has("layer_types"):
        kinds = config.kinds("layer_types", count, (FULL, LINEAR))
    else:
        kinds = tuple(FULL if (layer + 1) % every == 0 else LINEAR for layer in range(count))
    heads, kv_heads, head_dim = _heads(config)
    attention = Attention(heads, kv_heads, head_dim, qk_norm=True, gated=True)
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    delta = Recurrent(
        modules=(
            ("linear_attn.in_proj_qkvz", (2 * keys + 2 * values, hidden)),
            ("linear_attn.in_proj_ba", (2 * value_heads, hidden)),
            ("linear_attn.out_proj", (hidden, values)),
        ),
        conv_channels=2 * keys + values,
        conv_kernel=config.size("linear_conv_kernel_dim"),
        state_heads=value_heads,
        state_per_head=value_dim * key_dim,
        plain_elements=2 * value_heads + value_dim,  # dt_bias and A_log per head, one norm
    )
    experts = FeedForward(
        config.size("moe_intermediate_size"),
        experts=config.size("num_experts"),
        shared_intermediate=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
        taken=config.size("num_experts_per_tok", 10),
    )
    mixers = [attention if kind == FULL else delta for kind in kinds]
    return _geometry(config, [Layer(mixer, experts, 2 * hidden) for mixer in mixers])


def _granite_hybrid(config: Reader) -> Geometry:
    """Granite 4: Mamba-2 and attention layers, each with a shared MLP and, in the larger ones, experts."""
    count, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    key = "layer_types" if config.has("layer_types") else "layers_block_type"
    kinds = config.kinds(key, count, ("mamba", "attention", FULL))
    heads, kv_heads, head_dim = _heads(config)
    bias = config.flag("attention_bias")
    attention = Attention(heads, kv_heads, head_dim, bias=bias, output_bias=bias)
    inner = config.size("mamba_expand", 2) * hidden
    groups, state = config.size("mamba_n_groups", 1), config.size("mamba_d_state", 256)
    state_heads, state_dim = config.size("mamba_n_heads", 128), config.size("mamba_d_head", inner // 128)
    channels = inner + 2 * groups * state
    mamba = Recurrent(
        modules=(
            ("mamba.in_proj", (inner + channels + state_heads, hidden)),
            ("mamba.out_proj", (hidden, inner)),
        ),
        conv_channels=channels,
        conv_kernel=config.size("mamba_d_conv", 4),
        state_heads=state_heads,
        state_per_head=state_dim * state,
        plain_elements=channels + 3 * state_heads + inner,  # conv bias; dt_bias, A_log and D; one norm
        groups=groups,
        group_channels=2 * state,
    )
    if int(config.get("num_local_experts") or 0):
        mlp = FeedForward(
            config.size("intermediate_size"),
            experts=config.size("num_local_experts"),
            shared_intermediate=config.size("shared_intermediate_size"),
            taken=config.size("num_experts_per_tok", 1),
        )
    else:
        mlp = FeedForward(config.size("shared_intermediate_size"))
    mixers = [mamba if kind == "mamba" else attention for kind in kinds]
    return _geometry(config, [Layer(mixer, mlp, 2 * hidden) for mixer in mixers])


FAMILIES: dict[str, Callable[[Reader], Geometry]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3_text,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
}
