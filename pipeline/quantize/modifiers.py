"""What llm-compressor 0.14 is asked to do, by method: its modifiers, in order. Importable in that backend's environment only.

AWQ is a transform there: `AWQModifier` scales (ours cuts too), a `QuantizationModifier` after it rounds.

GPTQ rounds column by column and moves the columns not yet rounded so that the layer's output changes least. Blocks of 128 columns
and a damping of 1 % of the Hessian's mean diagonal are the paper's (Frantar et al., arXiv:2210.17323, section 3.3) and the
modifier's defaults; `static` order takes the columns with the loudest inputs first and leaves groups where they are, so the
checkpoint has no index (vLLM 0.32 compressed_tensors.py takes `static` and `weight`, and refuses `group` and `dynamic`).

FP8 is compressed-tensors' preset FP8_DYNAMIC: e4m3 weights with one scale per output, its largest weight over 448; activations are
rounded when served, each token by its own largest.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier

from pipeline.models.child import Progress
from pipeline.quantize.clip_search import EXPONENTS
from pipeline.quantize.clipping_modifier import ClippingAWQModifier
from pipeline.settings.schema import QuantizeRecipe

GPTQ_BLOCK = 128
GPTQ_DAMPING = 0.01
GPTQ_ORDER = "static"
KEPT = ["lm_head"]
# FP8 e4m3, one scale per layer for keys and one for values, fixed at calibration: what vLLM's kernels read. The largest of all text:
# llm-compressor's own choice moves by 1 % a batch from what the first one shows (0.14.0.1, observers/min_max.py), so that whatever
# is calibrated on, the first 2,048 tokens decide.
KV_SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, "observer": "static_minmax",
}  # fmt: skip
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8_ACTIVATIONS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None,
}  # fmt: skip


def weight_modifiers(recipe: QuantizeRecipe, progress: Progress, layers: int) -> list[Any]:
    """Those that quantize the weights, each saying how many of the `layers` it has done."""
    if recipe.method == "fp8":
        schemes = _groups(weights=FP8_WEIGHTS, input_activations=FP8_ACTIVATIONS)
        return [
            _counting(QuantizationModifier, "round layers", progress, layers)(
                config_groups=schemes, ignore=KEPT
            )
        ]
    integers = {
        "num_bits": recipe.bits, "type": "int", "symmetric": not recipe.zero_point, "strategy": "group",
        "group_size": recipe.group_size,
    }  # fmt: skip
    schemes = _groups(weights=integers)
    if recipe.method == "gptq":
        made = _counting(GPTQModifier, "round layers", progress, layers)
        return [
            made(
                config_groups=schemes, ignore=KEPT, block_size=GPTQ_BLOCK, dampening_frac=GPTQ_DAMPING, actorder=GPTQ_ORDER
            )
        ]  # fmt: skip
    return [
        # What the search tries is its own (`clip_search`); these two are written into the checkpoint's recipe.yaml.
        _counting(ClippingAWQModifier, "scale and cut layers", progress, layers)(
            n_grid=len(EXPONENTS), duo_scaling=False
        )
        if recipe.clip_search
        else _counting(AWQModifier, "scale layers", progress, layers)(),
        _counting(QuantizationModifier, "round layers", progress, layers)(config_groups=schemes, ignore=KEPT),
    ]


def kv_modifiers() -> list[Any]:
    """Those that find the scales of keys and values and leave the weights."""
    return [QuantizationModifier(targets=[], kv_cache_scheme=QuantizationArgs(**KV_SCHEME))]


def _groups(**parts: dict[str, Any]) -> dict[str, QuantizationScheme]:
    arguments = {name: QuantizationArgs(**values) for name, values in parts.items()}
    return {"group_0": QuantizationScheme(targets=["Linear"], **arguments)}


def _counting(base: type, phase: str, progress: Progress, layers: int) -> type:
    """`base` under its own name (the recipe is written by name), with progress by layer."""
    done = 0

    def on_sequential_epoch_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        progress(phase, min(done, layers), layers)
        done += 1
        return base.on_sequential_epoch_end(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(base.__name__, (base,), {"on_sequential_epoch_end": on_sequential_epoch_end})
