"""Each trap between transformers 4.51 and 5 is one edit, and each edit is one test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.models.normalize import (
    normalize_config,
    normalize_folder,
    normalize_generation_config,
    normalize_tokenizer_config,
)


def test_rope_theta_of_version_5_becomes_readable_for_4_51() -> None:
    saved_by_5 = {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "dtype": "bfloat16"}
    config = normalize_config(saved_by_5)
    assert config["rope_theta"] == 100000.0
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "rope_scaling" not in config


def test_rope_of_4_51_becomes_readable_for_5() -> None:
    saved_by_4 = {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "torch_dtype": "float16",
    }
    config = normalize_config(saved_by_4)
    assert config["rope_parameters"] == {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert config["dtype"] == config["torch_dtype"] == "float16"


def test_scaled_rope_of_5_keeps_its_scaling_for_4_51() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    config = normalize_config({"rope_parameters": rope})
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


def test_old_key_type_is_taken_for_rope_type() -> None:
    config = normalize_config({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}


def test_missing_theta_is_written_down() -> None:
    assert normalize_config({})["rope_theta"] == 10000.0


def test_contradicting_theta_is_refused() -> None:
    config = {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 100000.0}}
    with pytest.raises(UserInputError, match=r"here\.json: rope_theta=10000\.0 contradicts .*100000\.0"):
        normalize_config(config, "here.json")


def test_rope_per_layer_type_is_refused() -> None:
    with pytest.raises(UserInputError, match="per layer type"):
        normalize_config({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})


def test_normalizing_twice_changes_nothing() -> None:
    once = normalize_config(
        {"rope_parameters": {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}, "dtype": "bfloat16"}
    )
    assert normalize_config(once) == once


def test_tokenizer_class_unknown_to_4_51_becomes_the_generic_one() -> None:
    config = normalize_tokenizer_config(
        {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True}
    )
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_tokenizer_class_known_to_both_is_kept() -> None:
    assert (
        normalize_tokenizer_config({"tokenizer_class": "Qwen2Tokenizer"})["tokenizer_class"]
        == "Qwen2Tokenizer"
    )


def test_list_of_extra_special_tokens_gets_the_name_that_4_51_knows() -> None:
    config = normalize_tokenizer_config({"extra_special_tokens": ["<|tool|>"]})
    assert "extra_special_tokens" not in config
    assert config["additional_special_tokens"] == ["<|tool|>"]


def test_generation_config_takes_token_ids_from_config() -> None:
    result = normalize_generation_config(
        {"_from_model_config": True, "eos_token_id": [7, 8]}, {"bos_token_id": 0, "eos_token_id": 2}
    )
    assert result == {"eos_token_id": [7, 8], "bos_token_id": 0}


def test_folder_keeps_the_chat_template_in_both_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    normalize_folder(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 2}
