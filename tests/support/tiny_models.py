"""Tiny models in Hugging Face layout, written without torch: a random decoder and a byte-level tokenizer.

Small enough that quantizing one takes seconds, whole enough that every reader of a real model reads it.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.models.architectures import expected_shapes, geometry
from pipeline.models.normalize import normalize_folder

VOCAB = 264  # 256 bytes and the special tokens, rounded up to a multiple of 8

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "rope_theta": 50000.0,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 256,
}

# The shape of Qwen2.5: biases on q, k and v, few key-value heads, untied head in the 7B.
QWEN2: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias", "head_dim")},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}

# Llama without grouped queries: the only shape in which AutoAWQ also folds scales through v into o.
LLAMA_MHA: dict[str, Any] = {**LLAMA, "num_key_value_heads": 4}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by name; norms near one, matrices with a few loud input channels, as in real models."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, shape in expected_shapes(geometry(config)).items():
        if len(shape) == 1:
            center = 0.0 if name.endswith(".bias") else 1.0
            values = center + 0.1 * generator.standard_normal(shape)
        else:
            loud = 1.0 + 3.0 * (generator.random(shape[1]) < 0.05)
            values = 0.05 * generator.standard_normal(shape) * loud
        weights[name] = values.astype(np.float32)
    return weights


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> Path:
    """Write config, tokenizer and weights; returns `folder`."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    save_file(weights or random_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_bf16_model(folder: Path, config: dict[str, Any]) -> Path:
    """The same for models of any width: BF16, one tensor in memory at a time, readable by every environment.

    A million normal numbers over and over: their count is prime, so no two rows of a tensor are alike. Each tensor begins at
    another one: an output head equal to the embedding would be saved as tied to it.
    """
    drawn = 0.02 * np.random.default_rng(0).standard_normal(1_000_003, np.float32)
    shapes = expected_shapes(geometry(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    with (folder / "model.safetensors").open("wb") as file:
        text = json.dumps(header).encode()
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, shape) in enumerate(shapes.items()):
            norm = len(shape) == 1 and not name.endswith(".bias")
            # bfloat16 is the upper half of a float32
            half = ((drawn + np.float32(norm)).view(np.uint32) >> 16).astype(np.uint16)
            file.write(np.resize(np.roll(half, 7919 * number), math.prod(shape)).tobytes())
    normalize_folder(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one token per UTF-8 byte, in the tokenizer.json format."""
    alphabet = _byte_alphabet()
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    special = {"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
        )
    )


def _byte_alphabet() -> list[str]:
    """The printable stand-ins for the 256 bytes that byte-level BPE uses: printable bytes stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_texts(path: Path, texts: list[str], prefix: str = "t") -> Path:
    """A JSONL file of {"id", "text"}."""
    path.write_text(
        "".join(json.dumps({"id": f"{prefix}{n}", "text": text}) + "\n" for n, text in enumerate(texts))
    )
    return path


def prose(paragraphs: int, seed: int) -> list[str]:
    """Seeded nonsense sentences, different for different seeds."""
    generator = np.random.default_rng(seed)
    words = ["river", "stone", "market", "engine", "winter", "letter", "number", "garden", "window", "seven"]
    return [" ".join(generator.choice(words, size=60)) + "." for _ in range(paragraphs)]
