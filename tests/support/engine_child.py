"""What the installed vLLM makes of command lines: its real parser, its real configuration, its real model on no memory.

Runs in the serve environment: `python -m tests.support.engine_child`, a JSON request on stdin, a JSON answer in the last line of
stdout. Request: {"card": {"name", "capability", "memory_bytes"} or null for the CPU, "argv": {name: [...]}, "build": true, false or "config"}.
Answer per name: what was parsed, what was configured, and with `build` what a model of it runs on (`engine_probe.describe`) and
the log lines that were written on the way, or the error's traceback.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from tests.support.emulated_card import Card, emulate

PARSED = (
    "model", "served_model_name", "host", "port", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "enforce_eager",
    "seed", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "quantization", "generation_config",
    "disable_uvicorn_access_log", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "pipeline_parallel_size",
    "attention_backend",
)  # fmt: skip


def main() -> None:
    request = json.load(sys.stdin)
    if request["card"] is not None:
        emulate(Card(**request["card"]))
    answers = {name: _answer(argv, request["build"]) for name, argv in request["argv"].items()}
    print(json.dumps(answers, default=str))


def _answer(argv: list[str], build: bool | str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from pipeline.serving.flags.record import make_parser

    forget()
    with _log() as lines:
        parsed = make_parser().parse_args(argv)
        answer: dict[str, Any] = {"parsed": {name: getattr(parsed, name) for name in PARSED}}
        if build:
            try:
                config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
                answer["config"] = _configured(config)
                if build != "config":
                    answer["layers"] = _layers(config)
            except Exception:
                answer["error"] = traceback.format_exc()
    return answer | {"log": "\n".join(lines)}


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    """vLLM's log messages. Taken where records are made, because vLLM sets its handlers up anew on the way."""
    make, lines = logging.getLogRecordFactory(), []

    def factory(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(name, *args, **kwargs)
        if name.split(".", maxsplit=1)[0] == "vllm":
            lines.append(record.getMessage())
        return record

    logging.setLogRecordFactory(factory)
    try:
        yield lines
    finally:
        logging.setLogRecordFactory(make)


def forget() -> None:
    """Empty vLLM's caches, so that each command line is decided, and logged, as in a process of its own."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _configured(config: Any) -> dict[str, Any]:
    return {
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype),
        "quantization": config.model_config.quantization,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        # What keeps the newer model runner from being taken, beside Triton, which a CPU's environment hasn't got.
        "v2_unsupported": config._get_v2_model_runner_unsupported_features(),
        "pinned_backend": getattr(config.attention_config.backend, "name", None),
    }


def _layers(config: Any) -> dict[str, Any]:
    """What every layer of the model runs on."""
    from pipeline.serving.engine_probe import describe

    model = initialized(config)
    for module in model.modules():
        if hasattr(module, "attn_backend"):
            module.to_empty(device="cpu", recurse=False)  # the scales, of which nothing is said below
    told = describe(model)
    return {name: told[name] for name in ("attention_backend", "kv_cache_dtype", "linear")}


def initialized(config: Any) -> Any:
    """The model that the engine would load, on the device without memory: every layer has chosen its kernel by then."""
    import torch
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    # Compiling comes after loading, and its passes look kernels up.
    config.compilation_config.mode = CompilationMode.NONE
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config):
            _alone()
            with torch.device("meta"):
                return initialize_model(config)
    finally:
        torch.set_default_dtype(before)


def _alone() -> None:
    """The groups of a single process, which the layers ask for their ranks."""
    import torch.distributed
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)


if __name__ == "__main__":
    main()
