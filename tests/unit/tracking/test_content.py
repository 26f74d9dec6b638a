"""What goes into a run, without MLflow."""

from __future__ import annotations

import re
from dataclasses import replace

from pipeline.tracking.content import (
    comparison_content,
    flip_columns,
    proof_columns,
    variant_content,
    verdict_columns,
)
from tests.support.sample_results import LEVELS, SHAPES, sample_results

ALLOWED_KEY = re.compile(r"[\w\-./ ]{1,250}")  # mlflow 3.17 utils/validation.py


def test_identifying_parameters_are_in_every_run() -> None:
    bundle = sample_results()
    runs = [
        comparison_content(bundle, "demo comparison"),
        *(variant_content(bundle, name) for name in SHAPES),
    ]
    for run in runs:
        assert {
            "profile",
            "model",
            "device",
            "reference",
            "engine",
            "policy.quality_margin",
        } <= run.params.keys()
        assert {"kind", "decision", "profile", "reference", "emulated"} <= run.tags.keys()


def test_figures_equal_the_results() -> None:
    bundle = sample_results()
    found = {point.key: point.value for point in variant_content(bundle, "awq").metrics if point.step == 0}
    result = bundle.verdict.variants["awq"]
    assert result.quality and result.quality.delta_ci and result.capacity and result.throughput
    assert found["quality_delta"] == result.quality.delta
    assert (found["quality_delta_lo"], found["quality_delta_hi"]) == result.quality.delta_ci
    assert found["capacity_reported_tokens"] == result.capacity.reported_tokens
    assert found["capacity_fitting_sequences"] == 26
    assert found["peak_output_tok_s"] == result.throughput.peak_output_tok_s
    assert result.divergence is not None
    assert found["divergence/kl"] == result.divergence.kl.value
    assert found["divergence/same_top1_se"] == result.divergence.same_top1.se
    assert found["task/team_demo_short_delta"] == result.quality.delta
    assert found["perplexity_ratio"] == bundle.quantizations["awq"].perplexity.ratio
    assert found["proof/share_of_rounding_loss"] == 0.4673
    errors = [
        p.value for p in variant_content(bundle, "awq").metrics if p.key == "proof/effective_error_by_layer"
    ]
    assert errors == bundle.quantizations["awq"].effective_error.per_layer


def test_proofs_stand_side_by_side() -> None:
    columns = proof_columns(sample_results())
    assert columns["scheme"] == ["awq", "awq-lc"] and columns["backend"] == ["autoawq", "llmcompressor"]
    assert columns["proof/round_to_nearest_ratio"] == [1.3427, 1.3427]


def test_a_scheme_that_read_no_text_has_none_in_its_columns() -> None:
    """FP8 weights: null, not zero tokens; with KV scales the text is theirs."""
    bundle = sample_results()
    used = bundle.quantizations["awq"].calibration
    for of_kv, sha256 in ((None, None), (used, used and used.sha256)):
        bundle.quantizations["awq"] = bundle.quantizations["awq"].model_copy(
            update={"calibration": None, "kv_calibration": of_kv}
        )
        columns = proof_columns(bundle)
        assert (columns["proof/calibration_tokens"][0], columns["calibration_sha256"][0]) == (None, sha256)
        assert columns["proof/kv_calibration_tokens"][0] == (None if of_kv is None else 1024)
        variant_content(bundle, "awq")


def test_kv_scales_are_figures_and_none_is_no_zero() -> None:
    """Of two schemes, one with calibrated scales, so that they are missing in one row of the table and in one kind of run."""
    bundle = sample_results()
    columns = proof_columns(bundle)
    scales = bundle.quantizations["awq-lc"].kv_scales
    assert scales is not None
    assert columns["proof/kv_coverage_min"] == [None, scales.coverage[0]]
    assert columns["proof/kv_key_scale_max"] == [None, scales.key[1]]
    assert columns["proof/kv_value_scale_min"] == [None, scales.value[0]]
    assert columns["proof/kv_saturated_share"] == [None, scales.saturated.share]
    assert columns["proof/kv_largest_key"] == [None, scales.largest_key]
    assert columns["proof/kv_scale_layers"] == [None, 30]
    assert columns["proof/unquantized_modules"] == [2, 2]
    assert columns["proof/nan_inf_tensors_scanned"] == [271, 271] and columns["proof/nan_inf_values"] == [
        0,
        0,
    ]
    assert not any(point.key.startswith("proof/kv_") for point in variant_content(bundle, "awq").metrics)
    bundle = replace(bundle, quantizations={"awq": bundle.quantizations["awq-lc"]})
    found = {point.key: point.value for point in variant_content(bundle, "awq").metrics}
    assert found["proof/kv_coverage_max"] == scales.coverage[1]
    assert found["proof/kv_largest_value"] == scales.largest_value


def test_level_figures_carry_the_concurrency_as_step() -> None:
    points = variant_content(sample_results(), "bf16").metrics
    assert [point.step for point in points if point.key == "load/ttft_p50_ms"] == list(LEVELS)
    flat = {point.key for point in points if point.step == 0}
    assert {f"ttft_p50_ms_at_{level}" for level in LEVELS} <= flat


def test_what_was_not_measured_is_left_out() -> None:
    bundle = sample_results(frozenset({"awq"}))
    run = variant_content(bundle, "awq")
    keys = {point.key for point in run.metrics}
    assert not keys & {
        "capacity_reported_tokens",
        "observed_peak_running",
        "quality_delta",
        "peak_output_tok_s",
    }
    assert not any(key.startswith("load/") for key in keys)
    assert "capacity_predicted_tokens" in keys
    assert "None" not in run.params.values()


def test_a_percentile_that_the_sample_cannot_give_is_left_out() -> None:
    points = variant_content(sample_results(), "bf16").metrics
    steps = [point.step for point in points if point.key == "load/ttft_p99_ms"]
    assert steps == [level for level in LEVELS if 2 * level >= 100]


def test_keys_are_what_mlflow_takes() -> None:
    bundle = sample_results()
    for name in SHAPES:
        run = variant_content(bundle, name)
        for key in [*run.params, *(point.key for point in run.metrics)]:
            assert ALLOWED_KEY.fullmatch(key), key
        assert len({(point.key, point.step) for point in run.metrics}) == len(run.metrics)


def test_the_table_has_a_row_per_variant_and_no_invented_zero() -> None:
    columns = verdict_columns(sample_results(frozenset({"awq"})))
    assert columns["variant"] == list(SHAPES)
    row = columns["variant"].index("awq")
    assert columns["peak_output_tok_s"][row] is None and columns["quality_delta"][row] is None


def test_gates_that_do_not_count_are_no_tag() -> None:
    tags = variant_content(sample_results(), "awq").tags
    assert tags["gate.quality"] == "INCONCLUSIVE"
    assert "gate.latency-ttft" not in tags


def test_every_flipped_item_is_in_a_table() -> None:
    bundle = sample_results()
    table = flip_columns(bundle, "awq-fp8kv")
    assert {len(column) for column in table.values()} == {38}
    assert table["change"].count("lost") == 31
    assert table["reference_lead_nats"][0] == 4.5 and table["variant_lead_nats"][0] == -4.5
    assert table["prompt"][0].endswith("the answer is") and table["right_answer"][0].startswith(" choice")
    assert flip_columns(bundle, "bf16-again") == {} and flip_columns(bundle, "bf16") == {}
