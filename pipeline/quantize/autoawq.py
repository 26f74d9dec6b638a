"""AWQ by AutoAWQ 0.2.9, in its own environment, with its CPU defect worked around.

The defect: the grid search over scales keeps the original weights as `state_dict()` values moved by `.cpu()`,
which on a CPU is the same memory, so every trial scales the real weights and the checkpoint babbles. The public
hook `quantize(quantizer_cls=...)` lets us hand it a search whose `state_dict()` returns copies. Where the recipe clips, scales
and clipping are searched together, which doesn't take minutes (see `clip_search`) and loses less than one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.allocator import ALLOCATOR_ENVIRONMENT
from pipeline.files import read_json
from pipeline.models.child import Progress, child_main
from pipeline.quantize.base import Backend, QuantizeRequest
from pipeline.quantize.folder import dress, served_dtype
from pipeline.quantize.job import begin

if TYPE_CHECKING:
    import torch

BACKEND = Backend(
    name="autoawq",
    module="pipeline.quantize.autoawq",
    environment="autoawq",
    process_environment={**ALLOCATOR_ENVIRONMENT, "PYTHONWARNINGS": "ignore::DeprecationWarning"},
)

_PACKAGES = ("autoawq", "torch", "transformers", "tokenizers", "safetensors")


def run(raw_request: dict[str, Any]) -> dict[str, Any]:
    """Quantize `model_dir` into `out_dir`. Returns versions, calibration counts, device and peak memory."""
    import torch
    from awq import AutoAWQForCausalLM

    job = begin(raw_request)
    request, recipe = job.request, job.request.recipe
    # fp16 arithmetic has no fast path on a CPU; AutoAWQ supports nothing but fp16 on CUDA.
    model = AutoAWQForCausalLM.from_pretrained(
        str(request.model_dir),
        torch_dtype=torch.float16 if job.on_cuda else torch.float32,
        device_map=None,
        trust_remote_code=False,
        # For Qwen AutoAWQ drops the attention mask (quantizer.py, init_quant): SDPA is causal without one, eager isn't.
        attn_implementation="sdpa",
    )
    model.quantize(
        job.tokenizer,
        quant_config={
            "zero_point": recipe.zero_point,
            "q_group_size": recipe.group_size,
            "w_bit": recipe.bits,
            "version": "GEMM",
        },
        calib_data=job.pieces,
        max_calib_samples=len(job.pieces),
        max_calib_seq_len=recipe.sequence_tokens,
        apply_clip=recipe.clip_search,
        quantizer_cls=_quantizer_class(job.progress, recipe.clip_search),
    )
    _save(model, request)
    return job.evidence(_PACKAGES)


def _quantizer_class(progress: Progress, clips: bool) -> type:
    """AutoAWQ's quantizer with the search made safe on a CPU and with progress by layer."""
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.utils import get_best_device

    from pipeline.quantize.clip_search import clip, gram_matrices, search_scales

    class SafeQuantizer(AwqQuantizer):  # type: ignore[misc]
        _layers_begun = 0

        def _get_input_feat(self, layer: Any, named_linears: Any) -> Any:
            # Called once per decoder layer, first thing: the only place that tells where the loop is.
            progress("quantize layers", self._layers_begun, len(self.modules))
            self._layers_begun += 1
            return super()._get_input_feat(layer, named_linears)

        def _compute_best_scale(
            self,
            x: Any,
            w_mean: Any,
            x_mean: Any,
            module2inspect: Any,
            linears2scale: Any,
            fp16_output: Any,
            kwargs: Any,
        ) -> Any:
            if not clips:
                hook = module2inspect.register_state_dict_post_hook(_copy_state)
                try:
                    return super()._compute_best_scale(
                        x, w_mean, x_mean, module2inspect, linears2scale, fp16_output, kwargs
                    )
                finally:
                    hook.remove()
            return self._scale_for_clipping(x, x_mean, module2inspect, linears2scale, fp16_output, kwargs)

        def _scale_for_clipping(
            self, x: Any, x_mean: Any, module: Any, linears: Any, wanted: Any, kwargs: Any
        ) -> Any:
            whole = [linear.weight.data for linear in linears]

            def loss(trial: list[Any]) -> float:
                for linear, weight in zip(linears, trial):
                    linear.weight.data = weight
                return float(self._compute_loss(wanted, self._module_forward(x, module, kwargs), x.device))

            gram = gram_matrices(x.reshape(-1, x.shape[-1]), self.group_size)
            try:
                scales = search_scales(whole, x_mean.reshape(-1), gram, self.w_bit, loss)
            finally:
                for linear, weight in zip(linears, whole):
                    linear.weight.data = weight
            return scales.to(x_mean.dtype).cpu()

        def _search_best_clip(self, layer: Any, named_linears: Any, input_feat: Any) -> list[Any]:
            """Cut the weights here, since AutoAWQ's own cut knows one absolute value a group, and leave it nothing to do.

            AutoAWQ leaves queries and keys whole, as the error of a product of both is "hard to clip precisely". Cutting them
            too is worth it: plainly rounded and cut, the 135M model's perplexity is x1.093 with them and x1.144 without.
            """
            device = get_best_device()
            for name, linear in named_linears.items():
                inputs = input_feat[name]
                gram = gram_matrices(inputs.reshape(-1, inputs.shape[-1]).to(device), self.group_size)
                linear.weight.data = clip(linear.weight.data.to(device), gram, self.w_bit).cpu()
            return []

    return SafeQuantizer


def _copy_state(_module: Any, state: dict[str, torch.Tensor], _prefix: str, _metadata: Any) -> None:
    """Put copies into a state dict, so that what AutoAWQ keeps as the original stays the original."""
    for name, value in state.items():
        state[name] = value.clone()


def _save(model: Any, request: QuantizeRequest) -> None:
    """Write the checkpoint with the source's own config and tokenizer around it.

    Everything that was not quantized goes back to the source's dtype: computed in fp32 here, it would be served (and counted)
    at twice its size.
    """
    import torch

    dtype = getattr(torch, served_dtype(request.model_dir))
    packed = ("qweight", "qzeros", "scales")
    with torch.no_grad():
        for name, tensor in [*model.model.named_parameters(), *model.model.named_buffers()]:
            if tensor.is_floating_point() and not name.endswith(packed):
                tensor.data = tensor.data.to(dtype)
    out = Path(request.out_dir)
    model.save_quantized(str(out))
    dress(request.model_dir, out, read_json(out / "config.json")["quantization_config"])


if __name__ == "__main__":
    sys.exit(child_main(run, sys.argv))
