"""A folder passes only when it is whole and is the model that its config describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import UserInputError
from pipeline.models.architectures import expected_shapes, geometry, linear_modules
from pipeline.models.check import check_model, parameter_count, weight_bytes
from tests.support.tiny_models import LLAMA, QWEN2, random_weights, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", LLAMA)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_whole_model_passes_with_its_counts(folder: Path) -> None:
    facts = check_model(folder)
    elements = sum(int(np.prod(tensor.shape)) for tensor in random_weights(LLAMA).values())
    assert (facts.architecture, facts.dtype, facts.quantized) == ("LlamaForCausalLM", "F32", False)
    assert facts.parameters == parameter_count(folder) == elements
    assert facts.weight_bytes == weight_bytes(folder) == 4 * elements


def test_parameters_of_the_embedded_model() -> None:
    # SmolLM2-135M: the file holds 272 tensors of 269,030,016 bytes in BF16 (its safetensors header).
    config = {
        **LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    }
    shapes = expected_shapes(geometry(config))
    assert len(shapes) == 272
    assert 2 * sum(int(np.prod(shape)) for shape in shapes.values()) == 269_030_016


def test_parameters_of_qwen2_5_7b() -> None:
    # Qwen2.5-7B: 15,231,233,024 bytes of BF16 (model.safetensors.index.json of Qwen/Qwen2.5-7B-Instruct, total_size).
    config = {
        **QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    assert (
        2 * sum(int(np.prod(shape)) for shape in expected_shapes(geometry(config)).values()) == 15_231_233_024
    )
    assert len(linear_modules(geometry(config))) == 28 * 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer; needs one of tokenizer.json"),
        ("model.safetensors", "no weights; needs model.safetensors"),
    ],
)
def test_missing_file_is_named(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserInputError, match=message):
        check_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 4},
            r"self_attn\.k_proj\.weight has shape \[64, 128\], but config.json makes it \[128, 128\]",
        ),
        ({"intermediate_size": 512}, r"mlp\.gate_proj\.weight has shape \[256, 128\]"),
        ({"vocab_size": 300}, r"embed_tokens\.weight has shape \[264, 128\]"),
        ({"num_hidden_layers": 3}, r"tensors that config.json asks for are missing, first: model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"tensors that config.json doesn't account for, first: model\.layers\.1"),
        (
            {"architectures": ["GPTJForCausalLM"]},
            r"config\.json: architectures is 'GPTJForCausalLM'; its KV layout isn't modelled",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
            r"config\.json: architectures is 'MixtralForCausalLM', which isn't quantized here; allowed are Llama",
        ),
        ({"hidden_size": "wide"}, r"config\.json: hidden_size is 'wide', it must be a positive integer"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3, which doesn't divide num_attention_heads 4"),
        ({"tie_word_embeddings": False}, r"missing, first: lm_head\.weight"),
    ],
)
def test_config_that_belongs_to_another_model_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UserInputError, match=message):
        check_model(folder)


def test_quantized_model_is_no_source_but_may_be_looked_at(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(UserInputError, match=r"quantization_config\.quant_method='awq'"):
        check_model(folder)
    assert check_model(folder, allow_quantized=True).quantized


def test_cut_short_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserInputError, match=r"model\.safetensors: \d+ bytes, but its header describes \d+"):
        check_model(folder)


def test_file_that_is_no_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserInputError, match="not a safetensors file"):
        check_model(folder)


def test_shard_named_by_the_index_must_be_there(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserInputError, match=r"model-00001-of-00002\.safetensors"):
        check_model(folder)


def test_qwen2_biases_are_part_of_its_shape(tmp_path: Path) -> None:
    weights = random_weights(QWEN2)
    del weights["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(UserInputError, match=r"missing, first: model\.layers\.1\.self_attn\.k_proj\.bias"):
        check_model(write_model(tmp_path / "qwen", QWEN2, weights))
