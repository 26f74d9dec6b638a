"""Runs inside the engine: says in its log which kernels and KV scales the loaded model really has.

vLLM 0.32 doesn't tell: on a CPU no line names the attention backend, and a missing "scaling factor 1.0" warning means either
"scales came with the checkpoint" or "nobody looked for scales, so they are 1.0" (a plain or AWQ checkpoint with
`--kv-cache-dtype fp8`: measured). The loaded modules know. `install` is called by the plugin's entry point in every engine
process, whether or not an emulation is active, and changes nothing but the log.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from typing import Any

MARK = "quantgate-provenance:"
logger = logging.getLogger("vllm.quantgate")  # a child of vLLM's logger: its handlers and prefixes


def install() -> None:
    """Log one `quantgate-provenance: {json}` line after each model load. Idempotent."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if getattr(original, "_quantgate_probe", False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        try:
            logger.info("%s %s", MARK, json.dumps(describe(model), sort_keys=True))
        except Exception as error:  # a changed internal of the engine must not stop it; the reader sees null
            logger.warning("%s failed: %s: %s", MARK, type(error).__name__, error)
        return model

    load_model._quantgate_probe = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model


def describe(model: Any) -> dict[str, Any]:
    """What one loaded `torch.nn.Module` runs on.

    Keys: `attention` and `linear` (qualified class name -> number of layers), `attention_backend` (name -> layers),
    `kv_cache_dtype` (name -> layers), `kv_scale_min` and `kv_scale_max` (null without attention layers), `kv_scales` (layer's name -> [k, v]), `kv_scales_apart` (names of layers whose two copies
    of the scales differ: kernels get either the tensor or the number on the host, vllm/v1/attention/backends).
    """
    attention: Counter[str] = Counter()
    backend: Counter[str] = Counter()
    linear: Counter[str] = Counter()
    kv_dtype: Counter[str] = Counter()
    scales: dict[str, list[float]] = {}
    apart: list[str] = []
    for module in model.modules():
        if hasattr(module, "attn_backend") and hasattr(module, "kv_cache_dtype"):
            backend[module.attn_backend.get_name()] += 1
            attention[_qualified(getattr(module, "impl", module))] += 1
            kv_dtype[_kv_dtype(module)] += 1
            name = str(module.layer_name)
            scales[name] = [float(module._k_scale), float(module._v_scale)]
            if scales[name] != [module._k_scale_float, module._v_scale_float]:
                apart.append(name)
        elif getattr(module, "quant_method", None) is not None and hasattr(
            module, "input_size_per_partition"
        ):
            linear[_qualified(_kernel(module))] += 1
    return {
        "attention": dict(attention),
        "attention_backend": dict(backend),
        "linear": dict(linear),
        "kv_cache_dtype": dict(kv_dtype),
        "kv_scale_min": min((value for pair in scales.values() for value in pair), default=None),
        "kv_scale_max": max((value for pair in scales.values() for value in pair), default=None),
        "kv_scales": scales,
        "kv_scales_apart": apart,
    }


def _kernel(module: Any) -> Any:
    """The object that multiplies: the kernel where the layer has one, else its scheme or method.

    compressed-tensors' schemes of 8-bit floats call it `fp8_linear` (W8A8) and `linear_kernel` (W8A16).
    """
    for owner in (module.quant_method, getattr(module, "scheme", None)):
        for attribute in ("kernel", "fp8_linear", "linear_kernel"):
            kernel = getattr(owner, attribute, None)
            if kernel is not None:
                return kernel
    return getattr(module, "scheme", None) or module.quant_method


def _kv_dtype(module: Any) -> str:
    if module.kv_cache_dtype == "auto":
        return str(module.kv_cache_torch_dtype).removeprefix("torch.")
    return str(module.kv_cache_dtype)


def _qualified(thing: Any) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
