"""The config.json of a profile's checkpoints, without the weights: what decides how the engine configures itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.compatibility import weight_format
from pipeline.settings import Settings
from pipeline.settings.schema import QuantizeRecipe

MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


def write_config(settings: Settings, scheme: str, folder: Path) -> dict[str, Any]:
    """What the model's source and the quantizer leave in a checkpoint of `scheme`; returns it."""
    geometry = settings.model.config or {}
    config = {
        "model_type": MODEL_TYPES[geometry["architectures"][0]],
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **geometry,
    }
    if scheme != "bf16":
        config["quantization_config"] = quantization_config(settings.quantizers[scheme])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def quantization_config(recipe: QuantizeRecipe) -> dict[str, Any]:
    """As AutoAWQ 0.2.9 (awq/models/_config.py) and compressed-tensors 0.19 (llm-compressor's format) write it."""
    if recipe.backend == "autoawq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "zero_point": recipe.zero_point,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    group: dict[str, Any] = {
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": not recipe.zero_point, "strategy": "group",
            "group_size": recipe.group_size, "dynamic": False, "actorder": "static" if recipe.method == "gptq" else None,
            "observer": "minmax",
        }
    }  # fmt: skip
    if recipe.method == "fp8":
        eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "weights": eight_bits | {"strategy": "channel", "dynamic": False},
            "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
        }
    scales = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    quantized = recipe.quantizes_weights
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": weight_format(recipe) if quantized else "dense",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}} if quantized else {},
        "ignore": ["lm_head"] if quantized else [],
        "kv_cache_scheme": scales if recipe.calibrate_kv_scales else None,
    }
