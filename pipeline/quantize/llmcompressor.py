"""AWQ and calibrated FP8 KV scales by llm-compressor 0.14, in its own environment, its CPU defect worked around.

AWQ is a transform there: `AWQModifier` scales (ours cuts too), a `QuantizationModifier` after it rounds. Each modifier makes a
pass of its own over the calibration text ("independent"), so KV scales are taken from the scaled and cut model.

The defect: `IntermediatesCache.pin_memory` asks for an accelerator's pinned memory also where there is no accelerator, and AWQ
dies there. Pinning only speeds transfers up, so without an accelerator it is left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.allocator import ALLOCATOR_ENVIRONMENT
from pipeline.files import read_json
from pipeline.models.child import Progress, child_main
from pipeline.quantize.base import Backend, QuantizeRequest
from pipeline.quantize.folder import dress, served_dtype
from pipeline.quantize.job import begin

BACKEND = Backend(
    name="llmcompressor",
    module="pipeline.quantize.llmcompressor",
    environment="llmcompressor",
    process_environment=ALLOCATOR_ENVIRONMENT,
)

BATCH_TOKENS = 2048  # per forward pass: sequences are of one length, so larger batches only cost memory
_PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers", "tokenizers", "safetensors")
# FP8 e4m3, one scale per layer for keys and one for values, fixed at calibration: what vLLM's kernels read.
_KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def run(raw_request: dict[str, Any]) -> dict[str, Any]:
    """Quantize `model_dir` into `out_dir`. Returns versions, calibration counts, device and peak memory."""
    import torch
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    job = begin(raw_request)
    request, recipe = job.request, job.request.recipe
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir,
        dtype="auto" if job.on_cuda else torch.float32,  # 16-bit arithmetic has no fast path on most CPUs
        device_map="cuda" if job.on_cuda else None,
        attn_implementation="sdpa",
    )
    batches: Any = DataLoader(
        job.pieces,  # type: ignore[arg-type]
        batch_size=max(1, BATCH_TOKENS // recipe.sequence_tokens),
        collate_fn=lambda batch: {"input_ids": torch.tensor(batch)},
    )
    with _unpinned_on_cpu():
        oneshot(
            model=model,
            recipe=_modifiers(request, job.progress, len(model.model.layers)),
            dataset=batches,
            # As AutoAWQ does it: every layer is searched on what the original layers before it give. Behind layers that are
            # cut already the 135M model ends at x1.096 instead of x1.091.
            propagate_error=False,
        )
    _save(model, request)
    return job.evidence(_PACKAGES)


def _modifiers(request: QuantizeRequest, progress: Progress, layers: int) -> list[Any]:
    """What llm-compressor does, in order, each saying how many layers it has done."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    from pipeline.quantize.clip_search import EXPONENTS
    from pipeline.quantize.clipping_modifier import ClippingAWQModifier

    def counting(base: type, phase: str) -> type:
        """`base` under its own name (the recipe is written by name), with progress by layer."""
        done = 0

        def on_sequential_epoch_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            progress(phase, min(done, layers), layers)
            done += 1
            return base.on_sequential_epoch_end(self, *args, **kwargs)  # type: ignore[attr-defined]

        return type(base.__name__, (base,), {"on_sequential_epoch_end": on_sequential_epoch_end})

    recipe = request.recipe
    kv_scheme = QuantizationArgs(**_KV_SCHEME) if recipe.calibrate_kv_scales else None
    if not recipe.quantizes_weights:
        return [counting(QuantizationModifier, "calibrate KV scales")(targets=[], kv_cache_scheme=kv_scheme)]
    weights = QuantizationArgs(
        num_bits=recipe.bits, type="int", symmetric=not recipe.zero_point, strategy="group", group_size=recipe.group_size
    )  # fmt: skip
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    return [
        # What the search tries is its own (`clip_search`); these two are written into the checkpoint's recipe.yaml.
        counting(ClippingAWQModifier, "scale and cut layers")(n_grid=len(EXPONENTS), duo_scaling=False)
        if recipe.clip_search
        else counting(AWQModifier, "scale layers")(),
        counting(QuantizationModifier, "round layers")(
            config_groups=groups, ignore=["lm_head"], kv_cache_scheme=kv_scheme
        ),
    ]


@contextlib.contextmanager
def _unpinned_on_cpu() -> Iterator[None]:
    """See the module's docstring."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    original = IntermediatesCache.pin_memory
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


def _save(model: Any, request: QuantizeRequest) -> None:
    """Write the checkpoint with the source's own config and tokenizer around it.

    Scales go to the served dtype before the weights are packed by them, everything else after: a scale that is rounded later
    than the weights would no longer be theirs, and one in float32 makes the engine warn for every module.
    """
    import torch
    from compressed_tensors import ModelCompressor

    dtype = getattr(torch, served_dtype(request.model_dir))
    # A source in float32 is served in 16 bits too, and the planner reckons with scales of 16.
    scale_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16

    def cast(to: torch.dtype, *, scales: bool) -> None:
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point() and name.endswith("_scale") == scales:
                    tensor.data = tensor.data.to(to)

    cast(scale_dtype, scales=True)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    cast(dtype, scales=False)
    out = request.out_dir
    model.save_pretrained(str(out))
    dress(request.model_dir, out, read_json(out / "config.json")["quantization_config"])


if __name__ == "__main__":
    sys.exit(child_main(run, sys.argv))
