"""What each quantizer takes: architectures, group sizes, widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.capacity.geometry import Geometry
from pipeline.capacity.weights import Method, WeightScheme
from pipeline.compatibility.refusal import Refusal
from pipeline.compatibility.shards import Shard, shards
from pipeline.models.architectures import SUPPORTED
from pipeline.settings.schema import QuantizeMethod, QuantizeRecipe

GROUP_SIZES = (32, 64, 128)
"""What the recipes' schema allows."""


@dataclass(frozen=True)
class QuantizerRow:
    """One backend as released. Names of architectures are the model's class names."""

    backend: str
    version: str
    formats: Mapping[QuantizeMethod, Method]
    """Method -> format of the checkpoint, as `weights.WEIGHT_KERNELS` names it."""
    architectures: frozenset[str]
    """Those that it has AWQ's rules for: which layer's scales fold into which. The other methods need none."""
    architectures_source: str
    inputs_source: str
    outputs_multiple: int
    outputs_source: str
    computes_in: Mapping[str, str]
    """Kind of device -> dtype of the calibration: on a CPU 16 bits have no fast path, so both take twice the model's memory."""
    dtype_source: str


AUTOAWQ_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Of the architectures that the planner models, those that AutoAWQ has a class for, under the model type it knows them by."""

QUANTIZERS = {
    "autoawq": QuantizerRow(
        backend="autoawq",
        version="0.2.9",
        formats={"awq": "awq"},
        architectures=frozenset(AUTOAWQ_MODEL_TYPES),
        architectures_source="autoawq 0.2.9, awq/models/auto.py: AWQ_CAUSAL_LM_MODEL_MAP",
        inputs_source="autoawq 0.2.9, awq/quantize/quantizer.py: pseudo_quantize_tensor",
        outputs_multiple=8,
        outputs_source="autoawq 0.2.9, awq/modules/linear/gemm.py: WQLinear_GEMM packs 8 outputs into a word",
        computes_in={"cpu": "float32", "cuda": "float16"},
        dtype_source="autoawq 0.2.9, awq/models/base.py: torch_dtype may not work with other values than float16",
    ),
    "llmcompressor": QuantizerRow(
        backend="llmcompressor",
        version="0.14.0.1",
        # compressed-tensors 0.19.0, compressors/format.py: integers are packed, floats with rounded activations are not.
        formats={"awq": "pack-quantized", "gptq": "pack-quantized", "fp8": "float-quantized"},
        architectures=frozenset(
            {
                "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
                "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
            }
        ),
        architectures_source="llmcompressor 0.14.0.1, modifiers/transform/awq/mappings.py: AWQ_MAPPING_REGISTRY",
        inputs_source="compressed-tensors 0.19.0, quantization/lifecycle/forward_helpers.py",
        outputs_multiple=8,
        outputs_source="compressed-tensors 0.19.0, pack-quantized: zero points packed 8 outputs to a word",
        computes_in={"cpu": "float32", "cuda": "the checkpoint's dtype"},
        dtype_source="llmcompressor 0.14.0.1, modifiers/transform/awq/base.py: computes in the dtype that was loaded",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One quantization, as far as its possibility goes."""

    backend: str
    group_size: int | None
    """None: no groups, as weights stay at 16 bits or have a scale per output."""
    tensor_parallel: int = 1
    """Ranks that the result is served on."""
    method: QuantizeMethod = "awq"

    @classmethod
    def of(cls, recipe: QuantizeRecipe, tensor_parallel: int) -> Request:
        """What `recipe` asks for."""
        return cls(recipe.backend, recipe.group_size, tensor_parallel, recipe.method)


def weight_format(recipe: QuantizeRecipe) -> Method:
    """Format of the weights that `recipe` makes; "none" where they stay at 16 bits."""
    return QUANTIZERS[recipe.backend].formats[recipe.method] if recipe.quantizes_weights else "none"


def weight_scheme(recipe: QuantizeRecipe) -> WeightScheme:
    """How the capacity arithmetic counts the checkpoint that `recipe` makes."""
    form = weight_format(recipe)
    return WeightScheme(form, recipe.bits, recipe.group_size, recipe.zero_point, recipe.calibrate_kv_scales)


def quantizer_refusals(geometry: Geometry, request: Request) -> list[Refusal]:
    """Why `request` can't be done on a model, each with what to do instead; empty when it can."""
    row = QUANTIZERS.get(request.backend)
    if row is None:
        return [
            Refusal(
                f"quantizer.backend={request.backend!r} isn't in the compatibility table",
                f"use {' or '.join(QUANTIZERS)}",
                "pipeline/compatibility/quantizers.py",
            )
        ]
    if request.method not in row.formats:
        makers = [other.backend for other in QUANTIZERS.values() if request.method in other.formats]
        fix = f"use backend {' or '.join(makers)}"
        return [
            Refusal(
                f"{row.backend} makes no {request.method} weights",
                fix,
                "pipeline/compatibility/quantizers.py",
            )
        ]
    found = _architecture(geometry, row, request.method)
    if request.group_size is not None:
        whole, parts = shards(geometry, 1), shards(geometry, request.tensor_parallel)
        found += _groups(whole, parts, request.group_size, request.tensor_parallel, row)
        found += _outputs(whole, parts, request, row)
    return found


def _architecture(geometry: Geometry, row: QuantizerRow, method: QuantizeMethod) -> list[Refusal]:
    name = geometry.architecture
    if method == "awq" and name not in row.architectures:
        others = [
            other.backend
            for other in QUANTIZERS.values()
            if name in other.architectures and name in SUPPORTED
        ]
        fix = f"use backend {others[0]}" if others else f"quantized are {', '.join(SUPPORTED)}"
        return [Refusal(f"{row.backend} has no rules for {name}", fix, row.architectures_source)]
    if name not in SUPPORTED:
        return [
            Refusal(
                f"{row.backend} takes {name}, but nothing here proves its result",
                f"quantized are {', '.join(SUPPORTED)}",
                "pipeline/models/architectures.py",
            )
        ]
    return []


def _groups(
    whole: Sequence[Shard], parts: Sequence[Shard], size: int, ranks: int, row: QuantizerRow
) -> list[Refusal]:
    def fitting(shapes: Sequence[Shard]) -> list[int]:
        return [other for other in GROUP_SIZES if all(shape.inputs % other == 0 for shape in shapes)]

    wrong = next((shape for shape in whole if shape.inputs % size), None)
    if wrong is not None:
        sizes = fitting(parts) or fitting(whole)
        fix = (
            f"use group_size {_either(sizes)}" if sizes else "no group size fits this model, keep it in BF16"
        )
        return [
            Refusal(
                f"quantizer.group_size={size} doesn't divide the {wrong.inputs:g} inputs of {wrong.name}",
                fix,
                row.inputs_source,
            )
        ]
    wrong = next((shape for shape in parts if shape.inputs % size), None)
    if wrong is None:
        return []
    sizes = fitting(parts)
    fix = f"use group_size {_either(sizes)}" if sizes else f"use a tensor_parallel below {ranks}"
    return [
        Refusal(
            f"quantizer.group_size={size} doesn't divide the {wrong.inputs:g} inputs of {wrong.name} that each of {ranks} "
            "cards holds",
            fix,
            "vLLM 0.32, distributed/utils.py: verify_group_size_divides_partition",
        )
    ]


def _outputs(
    whole: Sequence[Shard], parts: Sequence[Shard], request: Request, row: QuantizerRow
) -> list[Refusal]:
    found = []
    for shapes, where in ((whole, ""), (parts, f" that each of {request.tensor_parallel} cards holds")):
        wrong = next((shape for shape in shapes if shape.outputs % row.outputs_multiple), None)
        if wrong is not None:
            fix = "this model can't be packed, keep it in BF16" if not where else "use fewer cards"
            found.append(
                Refusal(
                    f"the {wrong.outputs:g} outputs of {wrong.name}{where} aren't a multiple of {row.outputs_multiple}",
                    fix,
                    row.outputs_source,
                )
            )
            break
    return found


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))
