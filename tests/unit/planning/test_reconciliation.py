"""The plan beside the engine: the capacity record is completed, and a pool outside the band is named with its term."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.capacity import GIB, Card
from pipeline.capacity.reconcile import planned_terms
from pipeline.errors import EngineFailedError
from pipeline.planning.card import card_of
from pipeline.planning.reconciliation import reconciled
from pipeline.results import BudgetTerm, Capacity, PlanRow
from pipeline.serving.signals import LogSignals, MetricsSnapshot, parse_log, parse_metrics
from pipeline.settings import Settings, load_settings
from pipeline.verdict.gates import capacity_agreement_gate
from tests.support import sample_results

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests/contract/recorded"


def settings(profile: str) -> Settings:
    return load_settings([f"profile={profile}"], ROOT)


def card_as(profile: str, variant: str = "bf16", *overrides: str) -> Card:
    found = load_settings([f"profile={profile}", *overrides], ROOT)
    return card_of(found, found.variants[variant])


def row(
    tokens: int, band: tuple[int, int], weights_gib: float, card: Card | None = None, **changes: int
) -> PlanRow:
    values = {"max_model_len": 512, "block_size": 128, "blocks_per_sequence": 4} | changes
    capacity = Capacity(
        **values,
        kappa_bytes=23_040,
        kv_budget_bytes=None,
        predicted_tokens=tokens,
        predicted_tokens_band=band,
        predicted_sequences=None,
        predicted_fitting_sequences=None,
        reported_tokens=None,
        reported_sequences=None,
        observed_peak_running=None,
    )
    return PlanRow(
        variant="v", weights="bf16", kv_cache_dtype="bfloat16", weight_bytes=int(weights_gib * GIB),
        overhead_bytes=0, capacity=capacity, terms=[
            BudgetTerm(
                name=term.name, predicted_bytes=term.value_bytes, low_bytes=term.low_bytes, high_bytes=term.high_bytes,
                driver=term.driver, runs=term.runs, model_bytes=term.model_bytes,
            )
            for term in planned_terms(card or card_as("demo"), int(weights_gib * GIB))
        ],
    )  # fmt: skip


def log(tokens: int, sequences: float, **memory: float) -> LogSignals:
    text = f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for 8,192 tokens per request: {sequences:.2f}x"
    found = parse_log(text)
    return LogSignals(**{**found.__dict__, "memory_gib": memory})


def metrics(tokens: int, blocks: int | None, sequences: float) -> MetricsSnapshot:
    labels = f'kv_cache_size_tokens="{tokens}",kv_cache_max_concurrency="{sequences}"'
    if blocks is not None:
        labels += f',num_gpu_blocks="{blocks}",block_size="16"'
    return parse_metrics(f"vllm:cache_config_info{{{labels}}} 1.0\n")


def test_a_recorded_start_completes_the_record() -> None:
    text = (RECORDED / "log-0.32-cpu-bf16.txt").read_text(encoding="utf-8")
    signals = parse_log(text)
    assert signals.kv_cache_tokens is not None
    tokens = signals.kv_cache_tokens
    page = metrics(tokens, tokens // 128, tokens / 512)
    capacity, terms = reconciled(row(tokens, (tokens, tokens), 0.25), signals, page)
    assert capacity.reported_tokens == tokens
    assert capacity.reported_fitting_sequences == (tokens // 128 - 1) // 4
    assert {term.name for term in terms} == {"weights", "emulated"}


def test_one_block_off_fails_where_nothing_has_a_band() -> None:
    with pytest.raises(EngineFailedError, match="3,584 KV tokens where 3,712 were predicted"):
        reconciled(row(3712, (3712, 3712), 0.25), log(3584, 7.0), metrics(3584, 28, 7.0))


def test_a_card_within_its_band_passes_with_every_residual() -> None:
    card = card_as("rtx4090", "awq")
    planned = row(
        282_928, (267_000, 291_000), 5.19, card, max_model_len=8192, block_size=16, blocks_per_sequence=512
    )
    signals = log(
        280_000, 34.18, model_loading_gib=5.25, activation_gib=0.4, non_torch_gib=0.3, cuda_graphs_gib=0.35
    )
    capacity, terms = reconciled(planned, signals, metrics(280_000, 17_500, 34.18))
    assert capacity.reported_fitting_sequences == 34
    assert [term.within for term in terms] == [True] * 4 + [None], "no log names the sampler's state"
    assert sum(term.predicted_bytes for term in terms) == planned.weight_bytes + card.overhead_bytes


def test_a_cards_log_gives_every_term_once() -> None:
    """From the text to what `quantgate calibrate` reads: the graphs' estimate isn't counted as activation as well."""
    signals = parse_log((RECORDED / "log-0.32-rtx4090-awq-fp8kv.txt").read_text(encoding="utf-8"))
    card = card_as("rtx4090", "awq-fp8kv")
    planned = row(
        577_024, (569_000, 582_000), 5.19, card, max_model_len=8192, block_size=16, blocks_per_sequence=512
    )
    _, terms = reconciled(planned, signals, metrics(577_024, 36_064, 70.44))
    assert {term.name: round((term.reported_bytes or 0) / GIB, 2) for term in terms} == {
        "weights": 5.25, "non_torch": 0.25, "activation": 0.32, "cuda_graphs": 0.45, "sampler": 0,
    }  # fmt: skip
    assert all(term.within for term in terms if term.name != "sampler")
    assert terms[-1].note == "in the consumed memory, as computed"


OFF = r"off is weights: 9\.20 GiB reported, 5\.20 to 5\.35 GiB planned"


def outside(card: Card) -> tuple[PlanRow, LogSignals, MetricsSnapshot]:
    planned = row(
        282_928, (267_000, 291_000), 5.19, card, max_model_len=8192, block_size=16, blocks_per_sequence=512
    )
    signals = log(200_000, 24.41, model_loading_gib=9.2, activation_gib=0.6)
    return planned, signals, metrics(200_000, 12_500, 24.41)


def test_a_pool_outside_a_band_that_nobody_measured_is_a_finding_and_no_failure() -> None:
    """The run goes on; the verdict is held up by the gate, which names the term."""
    capacity, terms = reconciled(*outside(card_as("rtx4090", "awq")))
    assert capacity.disagreement is not None and re.search(OFF, capacity.disagreement)
    assert {term.name: term.within for term in terms}["weights"] is False
    measurement = sample_results.measurement("awq").model_copy(update={"capacity": capacity})
    gate = capacity_agreement_gate(measurement)
    assert gate.decision == "INCONCLUSIVE" and re.search(OFF, gate.why)
    assert "quantgate calibrate" in gate.why


def test_a_pool_outside_a_band_that_was_measured_on_this_card_fails_and_names_the_term() -> None:
    card = card_as("rtx4090", "awq")
    measured = replace(card, overheads=tuple(replace(term, runs=2) for term in card.overheads))
    with pytest.raises(EngineFailedError, match=OFF):
        reconciled(*outside(measured))


def test_only_the_terms_that_are_off_decide_whether_the_run_goes_on() -> None:
    """Weights and buffers were measured here and are off; that the graphs never were is no excuse."""
    card = card_as("rtx4090", "awq")
    measured = replace(
        card, overheads=tuple(replace(term, runs=2 * (term.name != "cuda_graphs")) for term in card.overheads)
    )
    planned, signals, page = outside(measured)
    signals.memory_gib["activation_gib"] = 0.3
    with pytest.raises(EngineFailedError, match=OFF):
        reconciled(planned, signals, page)


def test_tokens_that_the_pools_own_memory_doesnt_make_end_the_run() -> None:
    """Half of the tokens in the planned memory: kappa or the block size is off, whatever the bands."""
    planned, signals, page = outside(card_as("rtx4090", "awq"))
    planned = planned.model_copy(
        update={"capacity": planned.capacity.model_copy(update={"kv_budget_bytes": 15 * GIB})}
    )
    signals.memory_gib["available_kv_cache_gib"] = 15.0
    with pytest.raises(EngineFailedError, match="kappa or the block size is off"):
        reconciled(planned, signals, page)


def test_an_eager_start_agrees_with_a_plan_without_graphs() -> None:
    eager = card_as("rtx4090", "awq", "server.enforce_eager=true")
    planned = row(282_928, (267_000, 291_000), 5.19, eager, max_model_len=8192, block_size=16)
    _, terms = reconciled(planned, log(280_000, 34.18, cuda_graphs_gib=0.0), metrics(280_000, 17_500, 34.18))
    assert {term.name: term.within for term in terms}["cuda_graphs"] is True


def test_blocks_are_recovered_from_the_concurrency_where_the_page_lacks_them() -> None:
    planned = row(3584, (3584, 3584), 0.25)
    capacity, _ = reconciled(planned, log(3584, 7.0), metrics(3584, None, 7.0))
    assert capacity.reported_fitting_sequences == 6
