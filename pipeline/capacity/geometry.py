"""A decoder's shape, read from a Hugging Face config.json.

Only layouts whose KV size is one formula per layer are modelled: full attention with MHA, GQA or MQA. Others are
refused by name, since a guess about a KV layout is a wrong answer about a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserInputError

# Architectures whose every layer is full attention and whose MLP is gate/up/down (transformers' modelling files).
DENSE_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"})
# Of these, the ones with a bias on q, k and v (transformers models/qwen2/modeling_qwen2.py).
QKV_BIAS = frozenset({"Qwen2ForCausalLM"})


@dataclass(frozen=True)
class Geometry:
    """Layer counts and widths. All counts positive; `heads` is a multiple of `kv_heads`."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    max_position: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Geometry:
        """Read the geometry from a parsed config.json. `where` names the source in error messages."""
        names = config.get("architectures") or []
        architecture = str(names[0]) if names else ""
        if architecture not in DENSE_ARCHITECTURES:
            raise UserInputError(
                f"{where}: architectures is {names or 'missing'}; its KV layout isn't modelled, allowed are "
                f"{', '.join(sorted(DENSE_ARCHITECTURES))}"
            )
        if config.get("sliding_window") and config.get(
            "use_sliding_window", architecture == "MistralForCausalLM"
        ):
            raise UserInputError(
                f"{where}: sliding_window is {config['sliding_window']}; sliding-window layers aren't modelled"
            )

        def positive(key: str, default: int | None = None) -> int:
            value = config.get(key, default)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise UserInputError(f"{where}: {key} is {value!r}, it must be a positive integer")
            return value

        heads = positive("num_attention_heads")
        kv_heads = positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserInputError(
                f"{where}: num_key_value_heads {kv_heads} doesn't divide num_attention_heads {heads}"
            )
        hidden = positive("hidden_size")
        return cls(
            architecture=architecture,
            layers=positive("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=positive("head_dim", hidden // heads) if config.get("head_dim") else hidden // heads,
            intermediate=positive("intermediate_size"),
            vocabulary=positive("vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position=positive("max_position_embeddings"),
        )

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """One layer's linear modules as (out_features, in_features): what weight quantization acts on."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
