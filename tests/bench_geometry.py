"""The real 7B geometry, really served on this CPU: the planner's tokens against the engine's own.

Qwen2.5-7B-Instruct as conf/model/ has it, with random weights: 14.2 GiB of memory and minutes per start, so no test. The pool is a
chosen size; what is shown is that kappa, blocks and the engine's way to count them are right for this very model, in BF16 and FP8.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from pipeline.capacity import GIB, EngineRules, Geometry, kv_layout, rank_weight_bytes
from pipeline.environments import interpreter
from pipeline.errors import EngineFailedError, EnvironmentUnfitError
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from pipeline.settings import load_settings
from tests.support.checkpoint_configs import write_config
from tests.support.tiny_models import write_tokenizer

LENGTH = 8192
POOL_BYTES = GIB
PROCESSES_BYTES = 5 * GIB // 2
"""API server, engine core and worker with torch in each, beside the weights (measured: 2.2 GiB on 2 cores with vLLM 0.32.0)."""
START_S = 3600.0
RULES = EngineRules(block_size=128, kernel_block=32, max_num_batched_tokens=512, concurrent_batches=1)


def main() -> None:
    """One start per KV dtype; `EnvironmentUnfitError` where the memory isn't there, `EngineFailedError` where a figure differs."""
    settings = load_settings(["profile=rtx4090"])
    config = settings.model.config or {}
    geometry = Geometry.from_config(config, settings.model.name)
    weights = rank_weight_bytes(geometry)[0]
    needed, free = weights + POOL_BYTES + PROCESSES_BYTES, psutil.virtual_memory().available
    if free < needed:
        raise EnvironmentUnfitError(
            f"{settings.model.name}'s geometry takes {needed / GIB:.1f} GiB of memory to serve, {free / GIB:.1f} are free"
        )
    print(
        f"{settings.model.name}'s geometry with random weights ({weights / GIB:.2f} GiB) served on this CPU, "
        f"{POOL_BYTES / GIB:g} GiB of KV cache, {LENGTH:,} tokens per sequence"
    )
    print(f"{'KV cache':10} {'planned':>15} {'reported':>15} {'sequences':>10} {'ready after':>12}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_config(settings, "bf16", folder)
        write_tokenizer(folder)
        for dtype in ("bfloat16", "fp8"):
            pool = kv_layout(geometry, dtype, RULES).pool(POOL_BYTES, LENGTH)
            spec = ServeSpec(
                engine_version=locked_engine()[1], model_dir=folder, served_name=dtype, target="cpu",
                max_model_len=LENGTH, max_num_seqs=4, kv_cache_dtype=dtype, kv_cache_memory_bytes=POOL_BYTES,
                max_num_batched_tokens=RULES.max_num_batched_tokens, block_size=RULES.block_size,
                extra_args=("--load-format", "dummy"),
            )  # fmt: skip
            with serve(spec, interpreter("serve"), Path(temporary) / f"{dtype}.log", START_S) as server:
                metrics = parse_metrics(server.metrics_text())
                tokens, sequences = reported_capacity(parse_log(server.log_text()), metrics)
            print(
                f"{dtype:10} {pool.tokens:>8,} tokens {tokens:>8,} tokens {sequences:>9.2f}x {server.startup_s:>10.0f} s",
                flush=True,
            )
            reported, planned = (
                (metrics.num_gpu_blocks, tokens, sequences),
                (pool.blocks, pool.tokens, round(pool.logged_sequences, 2)),
            )
            if reported != planned:
                raise EngineFailedError(
                    f"{dtype}: (blocks, tokens, sequences) are {reported} in the engine, {planned} were planned"
                )
