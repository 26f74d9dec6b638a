"""AWQ, GPTQ and FP8 weights and calibrated FP8 KV scales by llm-compressor 0.14, in its own environment, its CPU defect worked around.

Weights first (`modifiers`), then the scales of keys and values in a run of its own: on sequences of the deployment's length, from
the model as it was scaled, cut or moved, and so that a checkpoint has bit for bit the weights of its twin without scales.

The defect: `IntermediatesCache.pin_memory` asks for an accelerator's pinned memory also where there is no accelerator, and the
passes over calibration text die there. Pinning only speeds transfers up, so without an accelerator it is left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.allocator import ALLOCATOR_ENVIRONMENT
from pipeline.files import read_json
from pipeline.models.child import child_main
from pipeline.quantize.base import Backend, QuantizeRequest
from pipeline.quantize.folder import dress, served_dtype
from pipeline.quantize.job import Job, begin

if TYPE_CHECKING:
    import torch

BACKEND = Backend(
    name="llmcompressor",
    module="pipeline.quantize.llmcompressor",
    environment="llmcompressor",
    process_environment=ALLOCATOR_ENVIRONMENT,
)

BATCH_TOKENS = 2048  # per forward pass: sequences are of one length, so larger batches only cost memory
_PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers", "tokenizers", "safetensors")
# As AutoAWQ does it, AWQ searches every layer on what the original layers before it give: behind layers that are cut already the
# 135M model ends at x1.096 instead of x1.091. GPTQ works on what the rounded layers before it give, as its paper's code does.
_BEHIND_ROUNDED = {"awq": False, "gptq": True, "fp8": False}


def run(raw_request: dict[str, Any]) -> dict[str, Any]:
    """Quantize `model_dir` into `out_dir`. Returns versions, calibration counts, device and peak memory."""
    import torch
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    from pipeline.quantize.modifiers import kv_modifiers, weight_modifiers

    job = begin(raw_request)
    request, recipe = job.request, job.request.recipe
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir,
        dtype="auto" if job.on_cuda else torch.float32,  # 16-bit arithmetic has no fast path on most CPUs
        device_map="cuda" if job.on_cuda else None,
        attn_implementation="sdpa",
    )
    with _unpinned_on_cpu():
        if recipe.quantizes_weights:
            oneshot(
                model=model,
                recipe=weight_modifiers(recipe, job.progress, len(model.model.layers)),
                dataset=_batches(job.pieces, job) if recipe.searches_weights else None,
                propagate_error=_BEHIND_ROUNDED[recipe.method],
            )
        if recipe.calibrate_kv_scales:
            with _fused_attention():
                # "basic": whole forward passes. Nothing is searched layer by layer, so no layer's inputs need to be kept.
                oneshot(
                    model=model,
                    recipe=kv_modifiers(),
                    dataset=_batches(job.kv_pieces, job, "calibrate KV scales"),
                    pipeline="basic",
                )
    _save(model, request)
    return job.evidence(_PACKAGES)


def _batches(pieces: Sequence[list[int]], job: Job, phase: str | None = None) -> Any:
    """Batches of about `BATCH_TOKENS`; with a `phase` each is progress."""
    import torch
    from torch.utils.data import DataLoader

    size = max(1, BATCH_TOKENS // len(pieces[0]))
    taken = 0

    def collate(batch: list[list[int]]) -> dict[str, torch.Tensor]:
        nonlocal taken
        if phase is not None:
            job.progress(phase, taken, len(pieces))
            taken += len(batch)
        return {"input_ids": torch.tensor(batch)}

    return DataLoader(pieces, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


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


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Leave the model its own attention, where llm-compressor forces the plain one on every pass.

    It does so for the layer-wise passes, which trace the model (0.14.0.1, utils/helpers.py: use_eager_attention). A plain pass needs
    none of it, and plain attention keeps a number per head and pair of tokens: 15 GB at 8,192 tokens of a 7B model.
    """
    from llmcompressor.utils import helpers

    original = helpers.use_eager_attention
    helpers.use_eager_attention = lambda _model: contextlib.nullcontext()
    try:
        yield
    finally:
        helpers.use_eager_attention = original


def _save(model: Any, request: QuantizeRequest) -> None:
    """Write the checkpoint with the source's own config and tokenizer around it.

    Scales go to the engine's dtype for them before the weights are packed by them, everything else to the served one after: a
    scale that is rounded later than the weights would no longer be theirs. That is the served dtype for integers, where one in
    float32 makes the engine warn for every module, and float32 for 8-bit floats (see `capacity.weights`).
    """
    import torch
    from compressed_tensors import ModelCompressor

    dtype = getattr(torch, served_dtype(request.model_dir))
    # A source in float32 is served in 16 bits too, and the planner reckons with scales of 16.
    scale_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    of_weights = torch.float32 if request.recipe.method == "fp8" else scale_dtype

    def cast(dtype_of: Callable[[str], torch.dtype | None]) -> None:
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                to = dtype_of(name)
                # An 8-bit float is a floating point too, and stays one.
                if to is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                    tensor.data = tensor.data.to(to)

    def scales(name: str) -> torch.dtype | None:
        if name.endswith(".weight_scale"):
            return of_weights
        return scale_dtype if name.endswith("_scale") else None

    cast(scales)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    cast(lambda name: None if name.endswith("_scale") else dtype)
    out = request.out_dir
    model.save_pretrained(str(out))
    dress(request.model_dir, out, read_json(out / "config.json")["quantization_config"])


if __name__ == "__main__":
    sys.exit(child_main(run, sys.argv))
