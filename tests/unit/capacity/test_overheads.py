"""The overheads move with what drives them, in the right direction and by the right size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.capacity import GIB, Card, Geometry, Term
from pipeline.capacity.overheads import (
    CONSTANTS,
    MIB,
    Constant,
    Constants,
    Drivers,
    context_term,
    overhead_terms,
    workspace_bytes,
)
from tests.support.geometries import ALL, QWEN25_7B

QWEN = Geometry.from_config(QWEN25_7B)
PLAIN = Drivers((0, 32), 2048, 128, capability=89)
NOTHING = Constants(dict.fromkeys(CONSTANTS, Constant(0, 0, 0)), 128)
"""So that what is left is the computed sizes."""
SOME = Constants({name: Constant(0.2, 0.1, 0.4, "here", 3) for name in CONSTANTS}, 128)


def terms(drivers: Drivers = PLAIN, geometry: Geometry = QWEN, using: Constants = NOTHING) -> dict[str, Term]:
    return {term.name: term for term in overhead_terms(geometry, drivers, using)}


def changed(using: Constants = NOTHING, **changes: Any) -> dict[str, Term]:
    return terms(replace(PLAIN, **changes), using=using)


def test_constants_bring_band_source_and_runs() -> None:
    for name in ("buffers", "activation", "non_torch"):
        plain, found = terms()[name], terms(using=SOME)[name]
        assert found.value_bytes - plain.value_bytes == pytest.approx(0.2 * GIB, abs=2)
        assert found.value_bytes - found.low_bytes == pytest.approx(0.1 * GIB, abs=2)
        assert (found.source, found.runs, found.certain) == ("here", 3, True)
    graphs = terms(using=SOME)["cuda_graphs"]
    # 35 piecewise and 19 whole graphs of 28 layers.
    assert graphs.high_bytes - graphs.low_bytes == pytest.approx(0.3 * 54 * 28 * MIB, abs=2)


def test_eager_has_no_graphs() -> None:
    graphs = changed(eager=True, using=SOME)["cuda_graphs"]
    assert (graphs.low_bytes, graphs.value_bytes, graphs.high_bytes, graphs.certain) == (0, 0, 0, True)


def test_batched_tokens_move_the_activations() -> None:
    large = changed(max_num_batched_tokens=32_768)["activation"]
    # 16 times the tokens through the widest layer: 3 x 18,944 + 4 x 3,584 values of two bytes.
    assert (
        large.value_bytes == 2 * 32_768 * (3 * 18_944 + 4 * 3_584) == 16 * terms()["activation"].value_bytes
    )
    assert large.driver == "a step of 32,768 tokens"
    narrow = changed(narrow_inputs=True)["activation"].value_bytes
    assert narrow - terms()["activation"].value_bytes == 2048 * 18_944, "the MLP's input once more, in 8 bits"


def test_sequences_move_sampler_state_logits_and_graphs() -> None:
    many, one = terms(), changed(max_num_seqs=1)
    # int32 counts of every token and a bit of every token, per sequence: 75 MiB for 127 more.
    assert many["sampler"].value_bytes == 128 * (4 * 152_064 + 4 * 4_752) == 128 * one["sampler"].value_bytes
    assert (one["cuda_graphs"].driver, many["cuda_graphs"].driver) == (
        "2 piecewise and 1 whole graphs",
        "35 piecewise and 19 whole graphs",
    )
    assert (
        changed(SOME, max_num_seqs=1)["cuda_graphs"].value_bytes
        < terms(using=SOME)["cuda_graphs"].value_bytes / 15
    )
    wide = changed(max_num_seqs=2048)["activation"]
    assert wide.driver == "logits of 2,048 sequences"
    assert wide.value_bytes == 2 * 2048 * (152_064 + 3_584), (
        "as the model made them, beside the hidden states"
    )
    assert changed(max_num_seqs=4096)["activation"] == wide, "no more rows than tokens"
    assert changed(max_num_seqs=2048)["activation"].high_bytes - wide.value_bytes == 4 * 2048 * 152_064


def test_the_older_runner_copies_logits_and_keeps_no_state() -> None:
    older = changed(v2=False, version=(0, 24), max_num_batched_tokens=8192, max_num_seqs=1024)
    assert "sampler" not in older
    # BF16 logits, three FP32 copies, one row for each of 128 multiprocessors.
    assert older["activation"].value_bytes == 8192 * 2 * 3_584 + 152_064 * (1024 * (2 + 3 * 4) + 128 * 4)
    sorted_ = changed(v2=False, version=(0, 16), max_num_batched_tokens=8192, max_num_seqs=1024)
    assert sorted_["activation"].value_bytes == 8192 * 2 * 3_584 + 152_064 * 1024 * (2 + 9 * 4)
    assert "cuda_graphs" not in sorted_, "it takes none off the pool"


def test_flashinfer_keeps_a_wrapper_of_each_decode_graph_and_a_workspace_outside() -> None:
    infer = changed(backend="FLASHINFER")["cuda_graphs"]
    assert infer.value_bytes - terms()["cuda_graphs"].value_bytes == 19 * 8 * MIB  # 1, 2, 4, 8 … 128
    assert infer.driver.endswith("19 FlashInfer wrappers")
    assert workspace_bytes(QWEN, PLAIN) == 0
    served = replace(PLAIN, backend="FLASHINFER")
    assert workspace_bytes(QWEN, served) == 394 * MIB
    large = replace(served, max_num_batched_tokens=32_768)
    assert workspace_bytes(QWEN, large) == 16 * 32_768 * 28 * 128
    assert workspace_bytes(QWEN, replace(large, tensor_parallel=2)) == 16 * 32_768 * 14 * 128
    assert workspace_bytes(QWEN, replace(served, batch_invariant=True)) == 2048 * MIB


def test_flash_attention_3_keeps_its_splits_where_2_has_none() -> None:
    hopper = changed(capability=90)["cuda_graphs"].value_bytes - terms()["cuda_graphs"].value_bytes
    assert hopper == 32 * 128 * 28 * 128 * 4  # splits x sequences x heads x channels in FP32


def test_ranks_share_the_layers_and_bring_nccl() -> None:
    one, two = (
        changed(SOME, max_num_batched_tokens=8192),
        changed(SOME, max_num_batched_tokens=8192, tensor_parallel=2),
    )
    saved = one["activation"].value_bytes - two["activation"].value_bytes
    assert saved == 8192 * 2 * 3 * 18_944 // 2
    assert two["non_torch"].value_bytes == pytest.approx(2 * one["non_torch"].value_bytes, abs=2)
    assert two["sampler"] == one["sampler"], "every rank samples from the whole vocabulary"
    assert context_term(replace(PLAIN, tensor_parallel=2), SOME).value_bytes == pytest.approx(
        0.4 * GIB, abs=2
    )
    assert context_term(PLAIN, SOME).value_bytes == pytest.approx(0.2 * GIB, abs=2)


def test_experts_keep_two_workspaces_but_for_mxfp4() -> None:
    mixtral = Geometry.from_config(ALL["mixtral-8x7b"])
    found = terms(geometry=mixtral)["experts"]
    # Two experts a token: gate and up together, 2 x 14,336, and their product.
    assert found.value_bytes == 2048 * 2 * 2 * (2 * 14_336 + 14_336)
    assert found.driver == "2,048 tokens x 2 experts" and found.certain
    assert "experts" not in terms(geometry=Geometry.from_config(ALL["gpt-oss-20b"]))


@pytest.mark.parametrize(
    ("seqs", "tokens", "count", "largest"),
    [
        (128, 2048, 35, 256), (1, 2048, 2, 2), (256, 2048, 51, 512), (1024, 8192, 51, 512), (16, 24, 6, 24),
        (100, 2048, 29, 200), (33, 2048, 12, 64),  # 33 itself is captured, off the stride of 8; 66 isn't
    ],
)  # fmt: skip
def test_capture_sizes_are_the_engines(seqs: int, tokens: int, count: int, largest: int) -> None:
    sizes = Drivers((0, 32), tokens, seqs).capture_sizes
    assert (len(sizes), sizes[-1]) == (count, largest)
    assert seqs in sizes or seqs > largest


def test_context_and_workspace_stand_beside_the_budget() -> None:
    """Others may hold less of an RTX 4090 at 0.92 than the 1.89 GiB beside u*V: the engine makes its context before it looks."""
    context = Term("context", int(0.45 * GIB), int(0.37 * GIB), int(0.53 * GIB))
    card = Card(int(23.64 * GIB), 0.92, (), 0, context, 394 * MIB)
    room = (card.free_bytes - card.requested_bytes) / GIB
    assert room == pytest.approx(1.44, abs=0.005)
    assert card.startable and not replace(card, held_bytes=int(1.5 * GIB)).startable
    assert replace(card, held_bytes=int(1.5 * GIB), context=Term("context", 0, 0, 0)).startable
    assert card.highest_utilization == 0.98
    assert card.left_outside_bytes / GIB == pytest.approx(1.44 - 394 / 1024, abs=0.005)
    assert card.budget(GIB) == replace(card, context=Term("context", 0, 0, 0), workspace_bytes=0).budget(GIB)
