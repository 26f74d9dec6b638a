"""The planner against start-up logs that others have published: cards, versions and models that aren't at hand here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.capacity import EngineRules, Geometry, KvPool, kv_layout, rank_weight_bytes
from pipeline.capacity.budget import GIB

FILE = Path(__file__).with_name("public_startup_logs.yaml")
CONTENT = yaml.safe_load(FILE.read_text(encoding="utf-8"))
LOGS: list[dict[str, Any]] = CONTENT["logs"]
ROUNDING_GIB = 0.005


def pools(log: dict[str, Any]) -> tuple[KvPool, KvPool]:
    """The smallest and the largest pool that the printed memory allows."""
    geometry = Geometry.from_config(CONTENT["configs"][log["config"]], log["config"])
    version = tuple(int(part) for part in str(log.get("vllm", "0.10")).split(".")[:2])
    rules = EngineRules(
        block_size=log["block_size"],
        max_num_batched_tokens=log.get("max_num_batched_tokens", 2048),
        concurrent_batches=1,  # asynchronous scheduling is the default of later versions only
        tokens_by_blocks=version < (0, 26),
    )
    dtype = {"auto": "bfloat16"}.get(log["kv_cache_dtype"], log["kv_cache_dtype"])
    layout = kv_layout(geometry, dtype, rules, log["tensor_parallel"], log.get("pipeline_parallel", 1))
    printed = log["available_gib"]
    ranks = printed if isinstance(printed, list) else [printed] * len(layout.block_bytes)
    low, high = (
        layout.pool([int((gib + sign * ROUNDING_GIB) * GIB) for gib in ranks], log["max_model_len"])
        for sign in (-1, 1)
    )
    return low, high


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log["id"])
def test_tokens_lie_within_the_printed_memory(log: dict[str, Any]) -> None:
    low, high = pools(log)
    if "blocks" in log:
        assert low.blocks <= log["blocks"] <= high.blocks
    if "tokens" in log:
        assert low.tokens <= log["tokens"] <= high.tokens
    if "max_concurrency" in log:
        assert low.logged_sequences - 0.005 <= log["max_concurrency"] <= high.logged_sequences + 0.005


@pytest.mark.parametrize(
    "log", [log for log in LOGS if "blocks" in log and "tokens" in log], ids=lambda log: log["id"]
)
def test_tokens_and_concurrency_follow_exactly_from_the_printed_blocks(log: dict[str, Any]) -> None:
    low, _ = pools(log)
    pool = KvPool(
        log["blocks"],
        low.block_size,
        low.blocks_per_sequence,
        low.max_model_len,
        low.groups,
        low.tokens_by_blocks,
    )
    assert pool.tokens == log["tokens"]
    assert round(pool.logged_sequences, 2) == log["max_concurrency"]


def test_there_are_enough_of_them_and_they_can_fail() -> None:
    assert len({log["source"] for log in LOGS}) >= 10
    low, high = pools(LOGS[0])
    assert high.tokens - low.tokens < 0.003 * LOGS[0]["tokens"]  # a wrong head count would be off by a factor


# Loaded weights come with rotary tables and kernel workspaces: never less than the checkpoint, and little more.
DENSE = [
    log for log in LOGS
    if "weights_gib" in log and not log["config"].startswith(("gpt-oss", "gemma-3-27b"))  # MXFP4 experts; a vision tower
]  # fmt: skip


@pytest.mark.parametrize("log", DENSE, ids=lambda log: log["id"])
def test_computed_weights_are_what_was_loaded(log: dict[str, Any]) -> None:
    geometry = Geometry.from_config(CONTENT["configs"][log["config"]], log["config"])
    computed = rank_weight_bytes(geometry, tensor_parallel=log["tensor_parallel"])[0] / GIB
    assert computed - ROUNDING_GIB <= log["weights_gib"] <= computed * 1.01 + 0.05
