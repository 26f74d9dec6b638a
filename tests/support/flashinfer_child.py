"""What the real FlashInfer is asked for by the real vLLM on an emulated card, and what becomes of it. For processes of the serve
environment that have the locked FlashInfer on their PYTHONPATH (`flashinfer_package`).

`python -m tests.support.flashinfer_child`, a JSON request on stdin: {"card": {...}, "argv": {name: [...]}}; a JSON answer in the last
line of stdout, per name {"sampler": bool, "asked": [modules of FlashInfer's], "errors": [tracebacks]}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.emulated_card import Card, emulate

SEQUENCES = 4
LENGTH = 20


def main() -> None:
    request = json.load(sys.stdin)
    card = Card(**request["card"])
    emulate(card)
    import flashinfer.utils

    flashinfer.utils.get_compute_capability = lambda device: card.capability  # it wants a device of CUDA's
    print(json.dumps({name: _answer(argv) for name, argv in request["argv"].items()}))


def _answer(argv: list[str]) -> dict[str, Any]:
    from flashinfer.jit.core import jit_spec_registry
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    from pipeline.serving.flags.record import make_parser
    from tests.support.engine_child import forget, initialized

    forget()
    jit_spec_registry._specs.clear()
    config = AsyncEngineArgs.from_cli_args(make_parser().parse_args(argv)).create_engine_config()
    initialized(config)
    sampler = flashinfer_sampler_supported()
    parts = [*([_ask_for_the_sampler] if sampler else []), lambda: _ask_for_attention(config)]
    errors = [error for part in parts if (error := _error(part))]
    return {"sampler": sampler, "asked": sorted(jit_spec_registry.get_all_specs()), "errors": errors}


def _error(part: Callable[[], None]) -> str | None:
    try:
        part()
    except Exception:
        return traceback.format_exc()
    return None


def _ask_for_the_sampler() -> None:
    """As the warm-up's first step does (v1/worker/gpu/warmup.py)."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sample

    logits = torch.randn(SEQUENCES, 32)
    flashinfer_sample(logits, torch.full((SEQUENCES,), 50), torch.full((SEQUENCES,), 0.9))


def _ask_for_attention(config: Any) -> None:
    """As its attention metadata does, for prefill and decode; nothing where the layers run on another backend."""
    import torch
    from vllm.config import set_current_vllm_config

    layers = config.compilation_config.static_forward_context
    first = next(iter(layers.values()))
    if first.attn_backend.get_name() != "FLASHINFER":
        return
    from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder, fast_plan_decode
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    with set_current_vllm_config(config):
        layouts = [layout.name for layout in get_supported_kv_cache_layouts([first.attn_backend])]
        resolve_kv_cache_layout(config, [layouts])
        spec = first.get_kv_cache_spec(config)
        builder = FlashInferMetadataBuilder(spec, list(layers), config, torch.device("cpu"))
        pages = -(-LENGTH // spec.block_size)
        indptr = torch.arange(SEQUENCES + 1, dtype=torch.int32)
        shape = {
            "num_qo_heads": builder.num_qo_heads, "num_kv_heads": builder.num_kv_heads, "page_size": builder.page_size,
            "sm_scale": builder.sm_scale, "window_left": builder.window_left, "logits_soft_cap": builder.logits_soft_cap,
            "kv_data_type": builder.kv_cache_dtype, "o_data_type": builder.model_config.dtype,
        }  # fmt: skip
        indices = torch.arange(SEQUENCES * pages, dtype=torch.int32)
        last = torch.full((SEQUENCES,), LENGTH - (pages - 1) * spec.block_size, dtype=torch.int32)
        lengths = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32)
        fast_plan_decode(
            builder._get_decode_wrapper(SEQUENCES), indptr_cpu=indptr * pages, indices=indices, last_page_len_cpu=last,
            seq_lens_cpu=lengths, head_dim=builder.head_dim, q_data_type=builder.q_data_type_decode, **shape,
        )  # fmt: skip
        builder._get_prefill_wrapper().plan(
            qo_indptr=indptr * LENGTH, paged_kv_indptr=indptr * pages, paged_kv_indices=indices, paged_kv_last_page_len=last,
            seq_lens=lengths, head_dim_qk=builder.head_dim, causal=True, q_data_type=builder.q_data_type_prefill, **shape,
        )  # fmt: skip


if __name__ == "__main__":
    main()
