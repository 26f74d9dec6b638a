"""Config and tokenizer files that transformers 4.51 (AutoAWQ's last) and 5 (vLLM's) read the same.

What transformers 5 saves, 4.51 misreads without a word: it doesn't know `rope_parameters`, so it computes the
positions with its default base of 10000, and calibrates a different model from the one that is served. The
edits here are pure functions from JSON to JSON, so that each trap is one test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.files import read_json, write_json

DEFAULT_ROPE_THETA = 10000.0
"""Base that every supported architecture takes without one (transformers 4.51, configuration_{llama,qwen2}.py)."""

# Class names of transformers 5 that 4.51 doesn't have, and the generic one (reads tokenizer.json) that both have.
GENERIC_TOKENIZER = "PreTrainedTokenizerFast"
UNKNOWN_TO_4_51 = ("TokenizersBackend", "PythonBackend", "SentencePieceBackend", "MistralCommonBackend")
SAVED_BY_5_ONLY = ("backend", "is_local", "local_files_only")


def normalize_config(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Return `config` with both spellings of everything that the two versions spell differently.

    rope: `rope_theta` and `rope_scaling` (4.51) beside `rope_parameters` (5); dtype: `torch_dtype` beside
    `dtype`. Raises `UserInputError` when the two spellings contradict each other, or when the rope differs by
    layer type, which 4.51 can't express.
    """
    result = {
        key: value for key, value in config.items() if key not in ("_name_or_path", "_model_name_or_path")
    }
    rope = dict(result.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserInputError(f"{where}: rope_parameters per layer type can't be read by transformers 4.51")
    old_theta, new_theta = result.get("rope_theta"), rope.get("rope_theta")
    if old_theta is not None and new_theta is not None and float(old_theta) != float(new_theta):
        raise UserInputError(
            f"{where}: rope_theta={old_theta} contradicts rope_parameters.rope_theta={new_theta}; they must be equal"
        )
    theta = float(next((value for value in (new_theta, old_theta) if value is not None), DEFAULT_ROPE_THETA))
    scaling = dict(result.get("rope_scaling") or {})
    if not rope:
        rope = {"rope_type": scaling.get("rope_type", scaling.get("type", "default")), **scaling}
        rope.pop("type", None)
    if rope.get("rope_type", "default") != "default":
        result["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    else:
        result.pop("rope_scaling", None)
    result["rope_theta"] = theta
    result["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": theta}
    dtype = result.get("dtype") or result.get("torch_dtype")
    if dtype is not None:
        result["dtype"] = result["torch_dtype"] = str(dtype).removeprefix("torch.")
    return result


def normalize_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config that 4.51 accepts: a class it has, and special tokens under its key.

    4.51 wants `extra_special_tokens` as a mapping and dies on version 5's list; its name for the list is
    `additional_special_tokens`, which 5 still reads.
    """
    result = {key: value for key, value in config.items() if key not in SAVED_BY_5_ONLY}
    if result.get("tokenizer_class", GENERIC_TOKENIZER) in UNKNOWN_TO_4_51:
        result["tokenizer_class"] = GENERIC_TOKENIZER
    result.setdefault("tokenizer_class", GENERIC_TOKENIZER)
    extra = result.get("extra_special_tokens")
    if isinstance(extra, list):
        del result["extra_special_tokens"]
        if extra:
            result["additional_special_tokens"] = extra
    return result


def normalize_generation_config(generation: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a generation_config that is always there and carries the token ids of `config`.

    Without the file each version derives its own defaults from config.json.
    """
    result = {
        key: value
        for key, value in generation.items()
        if key not in ("_from_model_config", "transformers_version")
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if result.get(key) is None and config.get(key) is not None:
            result[key] = config[key]
    return result


def normalize_folder(folder: str | Path) -> None:
    """Rewrite the JSON files of a model folder in place so that both versions read them the same.

    The chat template is kept both in tokenizer_config.json and in chat_template.jinja, with one text: the
    file wins in both versions where it exists.
    """
    root = Path(folder)
    config_path = root / "config.json"
    config = normalize_config(read_json(config_path), str(config_path))
    write_json(config_path, config)
    generation_path = root / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    write_json(generation_path, normalize_generation_config(generation, config))
    tokenizer_path = root / "tokenizer_config.json"
    tokenizer = normalize_tokenizer_config(read_json(tokenizer_path) if tokenizer_path.is_file() else {})
    template_path = root / "chat_template.jinja"
    if template_path.is_file():
        tokenizer["chat_template"] = template_path.read_text(encoding="utf-8")
    write_json(tokenizer_path, tokenizer)
