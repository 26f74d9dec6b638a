"""The planner against real start-ups of the engine, with random weights: one model for each kind of layer that runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.capacity import EngineRules, Geometry, kv_layout
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from tests.support.environments import environment_python
from tests.support.patience import ENGINE_START_S
from tests.support.tiny_models import VOCAB, write_tokenizer

LENGTH = 1024
POOL_BYTES = 64 * 2**20 + 54_321
RULES = EngineRules(block_size=128, kernel_block=32, max_num_batched_tokens=512, concurrent_batches=1)
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Full attention, norms on q and k, an explicit head_dim.
    "qwen3": {
        **SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 5, "head_dim": 64,
    },
    # One window in every layer.
    "mistral": {
        **SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 4,
        "sliding_window": 256,
    },
    # Five sliding layers to one full one, the last group short: padding as in the real 1B.
    "gemma3": {
        **SMALL, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 14,
        "sliding_window": 128, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", "bfloat16"), ("mistral", "bfloat16"), ("gemma3", "bfloat16"), ("gemma3", "fp8")],
)
def test_a_started_engine_reports_the_planned_pool(name: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    write_tokenizer(folder)
    spec = ServeSpec(
        engine_version=locked_engine()[1],
        model_dir=folder, served_name=name, target="cpu", max_model_len=LENGTH, max_num_seqs=4, kv_cache_dtype=dtype,
        kv_cache_memory_bytes=POOL_BYTES, max_num_batched_tokens=RULES.max_num_batched_tokens,
        block_size=RULES.block_size, extra_args=("--load-format", "dummy"),
    )  # fmt: skip
    pool = kv_layout(Geometry.from_config(MODELS[name]), dtype, RULES).pool(POOL_BYTES, LENGTH)
    with serve(spec, environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S) as server:
        metrics = parse_metrics(server.metrics_text())
        tokens, sequences = reported_capacity(parse_log(server.log_text()), metrics)
    assert (metrics.num_gpu_blocks, tokens) == (pool.blocks, pool.tokens)
    assert sequences == round(pool.logged_sequences, 2)
