"""Every gate reaches each of its decisions, and a missing measurement never becomes a GO."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.results import Capacity, Estimate, LoadLevel, Measurement, Provenance, QualityDelta
from pipeline.verdict.gates import (
    capacity_agreement_gate,
    capacity_gate,
    concurrency_observed_gate,
    kernel_provenance_gate,
    load_completed_gate,
)
from pipeline.verdict.policy import Policy, VariantIntent
from pipeline.verdict.quality import Evidence, divergence_gates, quality_gate, reference_quality_gate
from tests.support import sample_results
from tests.support.load_results import fill_test, probe, slo_search

POLICY = Policy(required_sequences=24, quality_margin=0.02, confidence=0.95)


def capacity(blocks: int | None = 106, **changes: Any) -> Capacity:
    """`blocks` blocks of 128 tokens, sequences of 512."""
    tokens = None if blocks is None else blocks * 128
    values: dict[str, Any] = {
        "max_model_len": 512,
        "block_size": 128,
        "kappa_bytes": 23_040,
        "kv_budget_bytes": None,
        "predicted_tokens": tokens,
        "predicted_sequences": None,
        "predicted_fitting_sequences": None,
        "reported_tokens": tokens,
        "reported_sequences": None,
        "reported_fitting_sequences": None if blocks is None else max(0, blocks - 1) // 4,
        "observed_peak_running": None,
    }
    return Capacity(**(values | changes))


def measurement(levels: list[dict[str, Any]] | None = None, **changes: Any) -> Measurement:
    """A sample measurement of variant awq with some fields replaced."""
    base = sample_results.measurement("awq").model_copy(update={"fill": None, "searches": []})
    if levels is not None:
        changes = {"fill": None, "searches": [], "levels": [level(**fields) for fields in levels]} | changes
    return base.model_copy(update=changes)


def level(**changes: Any) -> LoadLevel:
    base = sample_results.measurement("awq").levels[0]
    values = {"concurrency": 24, "requests": 48, "completed": 48, "failed": 0, "peak_running": 24}
    return base.model_copy(update=values | changes)


def provenance(**changes: Any) -> Provenance:
    return sample_results.measurement("bf16").provenance.model_copy(update=changes)


@pytest.mark.parametrize(
    ("blocks", "decision", "value"), [(97, "GO", 24), (96, "NO-GO", 23), (None, "INCONCLUSIVE", None)]
)
def test_capacity(blocks: int | None, decision: str, value: int | None) -> None:
    gate = capacity_gate(measurement(capacity=capacity(blocks)), POLICY)
    assert (gate.decision, gate.value, gate.limit) == (decision, value, 24)


@pytest.mark.parametrize(
    ("changes", "decision", "value"),
    [
        ({}, "GO", 0),
        ({"predicted_tokens": 107 * 128}, "INCONCLUSIVE", -128),
        ({"predicted_tokens": None}, "INCONCLUSIVE", None),
        ({"reported_tokens": None}, "INCONCLUSIVE", None),
    ],
)
def test_capacity_agreement(changes: dict[str, Any], decision: str, value: float | None) -> None:
    gate = capacity_agreement_gate(measurement(capacity=capacity(106, **changes)))
    assert (gate.decision, gate.value) == (decision, value)


def test_capacity_disagreement_says_blocks_and_both_numbers() -> None:
    gate = capacity_agreement_gate(measurement(capacity=capacity(106, predicted_tokens=107 * 128)))
    assert "13568" in gate.why and "13696" in gate.why and "-1 blocks" in gate.why


@pytest.mark.parametrize(
    ("fields", "minimum", "decision"),
    [
        ({}, 1.0, "GO"),
        ({"completed": 47, "failed": 1}, 1.0, "NO-GO"),
        ({"completed": 47, "failed": 1}, 0.95, "GO"),
        ({"completed": 40, "failed": 0}, 1.0, "INCONCLUSIVE"),
        ({"requests": 0, "completed": 0}, 1.0, "INCONCLUSIVE"),
    ],
)
def test_load_completed(fields: dict[str, int], minimum: float, decision: str) -> None:
    policy = POLICY.model_copy(update={"minimum_completed": minimum})
    assert load_completed_gate(measurement([fields]), policy).decision == decision


def test_one_failure_at_one_level_is_named() -> None:
    gate = load_completed_gate(measurement([{}, {"concurrency": 40, "completed": 45, "failed": 3}]), POLICY)
    assert gate.decision == "NO-GO" and "3 at concurrency 40" in gate.why


@pytest.mark.parametrize(
    ("levels", "blocks", "decision", "value"),
    [
        ([{"peak_running": 24}], 106, "GO", 24),
        ([{"peak_running": 20}, {"concurrency": 40, "peak_running": 31}], 106, "GO", 31),
        ([{"peak_running": 12}], 54, "NO-GO", 12),
        ([{"peak_running": 12}], 106, "INCONCLUSIVE", 12),
        ([{"peak_running": None}], 106, "INCONCLUSIVE", None),
        ([{"concurrency": 16, "peak_running": 16}], 106, "INCONCLUSIVE", None),
        ([], 106, "INCONCLUSIVE", None),
    ],
)
def test_concurrency_observed(
    levels: list[dict[str, Any]], blocks: int, decision: str, value: float | None
) -> None:
    gate = concurrency_observed_gate(measurement(levels, capacity=capacity(blocks)), POLICY)
    assert (gate.decision, gate.value) == (decision, value)


@pytest.mark.parametrize(
    ("peak", "blocks", "decision"),
    [(24, 106, "GO"), (12, 54, "NO-GO"), (20, 106, "INCONCLUSIVE"), (None, 106, "INCONCLUSIVE")],
)
def test_the_fill_tests_full_length_sequences_decide_where_there_is_one(
    peak: int | None, blocks: int, decision: str
) -> None:
    """40 short requests at a level prove nothing about 24 of full length."""
    own = measurement([{"concurrency": 40, "peak_running": 40}], capacity=capacity(blocks))
    own = own.model_copy(update={"fill": fill_test(offered=28, observed_peak_running=peak)})
    gate = concurrency_observed_gate(own, POLICY)
    assert (gate.decision, gate.value) == (decision, peak)


def test_a_failure_in_a_probe_counts() -> None:
    own = measurement([{}]).model_copy(
        update={"searches": [slo_search(probe(load=8, requests=52, failed=2))]}
    )
    gate = load_completed_gate(own, POLICY)
    assert gate.decision == "NO-GO" and gate.why == "2 of 100 requests failed: 2 in the probe closed-8"
    fine = measurement([{}]).model_copy(update={"searches": [slo_search(probe(load=8, requests=52))]})
    assert load_completed_gate(fine, POLICY).decision == "GO"


BF16 = VariantIntent(weights="bf16", kv_cache_dtype="bfloat16")
AWQ_FP8 = VariantIntent(weights="awq", kv_cache_dtype="fp8", kv_scales="1.0", weights_kernel="marlin")
REAL_BF16 = {"kv_cache_dtype": "bfloat16", "weights_kernel": None, "kv_scales": None}
REAL_AWQ_FP8 = {"kv_cache_dtype": "fp8_e4m3", "weights_kernel": "MarlinLinearKernel", "kv_scales": "1.0"}


@pytest.mark.parametrize(("intent", "found"), [(BF16, REAL_BF16), (AWQ_FP8, REAL_AWQ_FP8)])
def test_kernel_provenance_go(intent: VariantIntent, found: dict[str, Any]) -> None:
    assert kernel_provenance_gate(intent, [provenance(**found)] * 2).decision == "GO"


@pytest.mark.parametrize(
    ("intent", "found", "says"),
    [
        (BF16, {"kv_cache_dtype": "fp8_e4m3"}, "the engine took fp8_e4m3"),
        (AWQ_FP8, {"kv_cache_dtype": "bfloat16"}, "the engine took bfloat16"),
        (BF16, {"kv_cache_dtype": "auto"}, "not known (auto)"),
        (BF16, {"kv_cache_dtype": None}, "not known (not logged)"),
        (BF16, {"weights_kernel": "MarlinLinearKernel"}, "means unquantized weights"),
        (AWQ_FP8, {"weights_kernel": None}, "no quantized kernel"),
        (AWQ_FP8, {"kv_cache_dtype": "fp8_per_token_head"}, "the engine took fp8_per_token_head"),
        (AWQ_FP8, {"kv_skipped_layers": 4}, "leaves the cache of 0 layers at 16 bits, the engine of 4"),
        (AWQ_FP8, {"weights_kernel": "awq_gemm"}, "means the kernel marlin"),
        (AWQ_FP8, {"kv_scales": "checkpoint"}, "means KV scales 1.0"),
        (AWQ_FP8, {"kv_scales": None}, "unknown ones"),
    ],
)
def test_kernel_provenance_mismatch(intent: VariantIntent, found: dict[str, Any], says: str) -> None:
    """In either of the two runs, a mismatch decides nothing and is said."""
    right = REAL_BF16 if intent is BF16 else REAL_AWQ_FP8
    gate = kernel_provenance_gate(intent, [provenance(**right), provenance(**(right | found))])
    assert gate.decision == "INCONCLUSIVE" and says in gate.why


def test_a_pinned_attention_backend_must_have_run() -> None:
    pinned = BF16.model_copy(update={"attention_backend": "FLASHINFER"})
    for taken, decision in (("FLASHINFER", "GO"), ("FLASH_ATTN", "INCONCLUSIVE"), (None, "INCONCLUSIVE")):
        gate = kernel_provenance_gate(pinned, [provenance(**(REAL_BF16 | {"attention_backend": taken}))])
        assert gate.decision == decision, gate.why


def test_scales_per_token_and_head_are_a_dtype_of_their_own() -> None:
    intent = AWQ_FP8.model_copy(update={"kv_cache_dtype": "fp8_per_token_head", "kv_scales": None})
    right = REAL_AWQ_FP8 | {"kv_cache_dtype": "fp8_per_token_head", "kv_scales": None}
    assert kernel_provenance_gate(intent, [provenance(**right)]).decision == "GO"
    wrong = right | {"kv_cache_dtype": "fp8"}
    assert kernel_provenance_gate(intent, [provenance(**wrong)]).decision == "INCONCLUSIVE"


def test_kernel_provenance_two_engine_versions() -> None:
    runs = [provenance(**REAL_BF16), provenance(**REAL_BF16, engine_version="0.1")]
    gate = kernel_provenance_gate(BF16, runs)
    assert gate.decision == "INCONCLUSIVE" and "different engines" in gate.why


def test_kernel_provenance_needs_a_run() -> None:
    assert kernel_provenance_gate(BF16, []).decision == "INCONCLUSIVE"


def delta(interval: tuple[float, float] | None, **changes: Any) -> QualityDelta:
    values: dict[str, Any] = dict.fromkeys(QualityDelta.model_fields)
    values |= {"n": 300, "delta": -0.01, "delta_ci": interval, "delta_se": 0.012, "confidence": 0.95}
    values |= {"margin": 0.02, "slices": {}, "items_to_decide": 980, "mcnemar_p": 0.4, "flips": 15}
    return QualityDelta(**(values | changes))


@pytest.mark.parametrize(
    ("interval", "decision"),
    [
        ((-0.019, 0.01), "GO"),
        ((-0.09, -0.03), "NO-GO"),
        ((-0.035, 0.01), "INCONCLUSIVE"),
        (None, "INCONCLUSIVE"),
    ],
)
def test_quality(interval: tuple[float, float] | None, decision: str) -> None:
    gate = quality_gate(delta(interval), None, 0.02)
    assert (gate.decision, gate.limit) == (decision, -0.02)


def test_quality_inconclusive_says_the_items_needed() -> None:
    assert "about 980 items would decide it" in quality_gate(delta((-0.035, 0.01)), None, 0.02).why


def test_quality_inconclusive_with_enough_items_says_what_the_observed_loss_takes() -> None:
    gate = quality_gate(delta((-0.035, 0.01), items_to_decide=250), None, 0.02)
    assert "250 items would have decided it" in gate.why
    assert "at the observed one about 1660 would" in gate.why  # 1.96² · 300 · 0.012² / 0.01²


def test_quality_without_a_significant_difference_is_no_go_for_lack_of_evidence() -> None:
    """Delta 0, p = 1, and an interval that reaches below the margin: not a GO."""
    gate = quality_gate(delta((-0.05, 0.05), delta=0.0, mcnemar_p=1.0), None, 0.02)
    assert gate.decision == "INCONCLUSIVE"


def test_quality_with_a_reference_that_differs_from_itself() -> None:
    noisy = delta((-0.08, -0.03), mcnemar_p=0.001, flips=40)
    gate = quality_gate(delta((-0.01, 0.02)), noisy, 0.02)
    assert gate.decision == "INCONCLUSIVE" and "second run (40 flips" in gate.why
    assert quality_gate(delta((-0.01, 0.02)), delta((-0.02, 0.02), mcnemar_p=0.04), 0.02).decision == "GO"


def test_a_refusal_to_compare_is_inconclusive_with_its_reason() -> None:
    gate = quality_gate(
        delta((-0.01, 0.02)), None, 0.02, refusal="runs over different items can't be compared"
    )
    assert (gate.decision, gate.value) == ("INCONCLUSIVE", None) and "different items" in gate.why


def test_items_that_could_not_show_a_loss_are_no_go_ahead() -> None:
    gate = quality_gate(delta((-0.01, 0.02), untold="everything is scored alike"), None, 0.02)
    assert gate.decision == "INCONCLUSIVE" and "scored alike" in gate.why


def test_a_sequential_verdict_says_its_look() -> None:
    gate = quality_gate(delta((-0.01, 0.02), look=2, planned_looks=[100, 200, 300]), None, 0.02)
    assert gate.decision == "GO" and "(look 2 of 3)" in gate.why


def test_reference_quality() -> None:
    gate = reference_quality_gate(True, 0.02)
    assert (gate.decision, gate.value) == ("GO", 0.0) and "by definition" in gate.why
    assert reference_quality_gate(False, 0.02).decision == "INCONCLUSIVE"


def test_nothing_measured_is_inconclusive_everywhere() -> None:
    gates = [
        capacity_gate(None, POLICY),
        capacity_agreement_gate(None),
        load_completed_gate(None, POLICY),
        concurrency_observed_gate(None, POLICY),
        kernel_provenance_gate(BF16, []),
        quality_gate(None, None, 0.02),
    ]
    assert {gate.decision for gate in gates} == {"INCONCLUSIVE"}
    assert all(gate.value is None and gate.why for gate in gates)


LIMITED = POLICY.model_copy(
    update={"max_kl": 0.1, "min_same_top1": 0.9, "max_perplexity_ratio": 1.2, "max_delta_p_rms": 0.1}
)


def estimate(value: float, error: float) -> Estimate:
    return Estimate(value=value, se=error, ci=(value - 2 * error, value + 2 * error))


@pytest.mark.parametrize(
    ("kl", "top1", "ratio", "decisions"),
    [
        (0.05, 0.95, 1.1, ["GO", "GO", "GO"]),
        (0.15, 0.80, 1.3, ["NO-GO", "NO-GO", "NO-GO"]),
        (0.11, 0.89, 1.21, ["INCONCLUSIVE", "INCONCLUSIVE", "INCONCLUSIVE"]),
        (0.09, 0.91, 1.19, ["INCONCLUSIVE", "INCONCLUSIVE", "INCONCLUSIVE"]),
    ],
)
def test_divergence_gates_take_the_whole_interval(
    kl: float, top1: float, ratio: float, decisions: list[str]
) -> None:
    figures = {"kl": kl, "same_top1": top1, "perplexity_ratio": ratio, "delta_p_rms": kl}
    found = sample_results.divergence("awq").model_copy(
        update={key: estimate(value, 0.01) for key, value in figures.items()}
    )
    gates = divergence_gates(Evidence(True, divergence=found), LIMITED)
    assert [gate.decision for gate in gates] == [*decisions, decisions[0]]
    names = ["divergence-kl", "divergence-top1", "divergence-perplexity", "divergence-delta-p"]
    assert [gate.name for gate in gates] == names


def test_divergence_gates_are_optional_and_never_go_without_evidence() -> None:
    assert divergence_gates(Evidence(True, divergence=sample_results.divergence("awq")), POLICY) == []
    gates = divergence_gates(Evidence(True, divergence_refusal="the token streams differ at p3"), LIMITED)
    assert {gate.decision for gate in gates} == {"INCONCLUSIVE"} and "differ at p3" in gates[0].why
    assert "not measured" in divergence_gates(Evidence(True), LIMITED)[0].why
