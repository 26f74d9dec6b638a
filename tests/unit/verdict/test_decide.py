"""From gates to a decision, and from result records to the verdict file's record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import UserInputError
from pipeline.results import Decision, Gate, Measurement, Quality, RollingText, Sample, Verdict
from pipeline.verdict.decide import build_verdict, decide
from pipeline.verdict.latency import RequestLatency
from pipeline.verdict.policy import Policy, Slo, VariantIntent
from tests.support import sample_results

POLICY = Policy(
    required_sequences=24, quality_margin=0.05, confidence=0.95, task_margins={"team_demo_short": 0.25}
)
INTENTS = {
    "bf16": VariantIntent(weights="bf16", kv_cache_dtype="bfloat16"),
    "bf16-again": VariantIntent(weights="bf16", kv_cache_dtype="bfloat16"),
    "bf16-fp8kv": VariantIntent(weights="bf16", kv_cache_dtype="fp8"),
    "awq": VariantIntent(weights="awq", kv_cache_dtype="bfloat16"),
    "awq-fp8kv": VariantIntent(weights="awq", kv_cache_dtype="fp8"),
}


def gate(decision: Decision, gating: bool = True) -> Gate:
    return Gate(name="x", decision=decision, value=None, limit=None, unit="", why="", gating=gating)


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        (["GO", "GO"], "GO"),
        (["GO", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["GO", "INCONCLUSIVE", "NO-GO"], "NO-GO"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_decide(decisions: list[Decision], expected: Decision) -> None:
    assert decide([gate(decision) for decision in decisions]) == expected


def test_gates_that_dont_gate_dont_count() -> None:
    assert decide([gate("GO"), gate("NO-GO", gating=False)]) == "GO"
    assert decide([gate("GO", gating=False)]) == "INCONCLUSIVE"


def verdict(
    measurements: dict[str, Measurement | None] | None = None,
    qualities: dict[str, Quality | None] | None = None,
    **changes: Any,
) -> Verdict:
    """The verdict on the sample results, every engine having taken what its variant says."""
    results = sample_results.sample_results()
    arguments: dict[str, Any] = {
        "profile": "demo",
        "reference": "bf16",
        "control": "bf16-again",
        "intents": INTENTS,
        "measurements": results.measurements | (measurements or {}),
        "qualities": results.qualities | (qualities or {}),
        "requests": {},
        "policy": POLICY,
        "device_emulated": True,
    }
    return build_verdict(**(arguments | changes))


def gates_of(found: Verdict, variant: str) -> dict[str, Gate]:
    return {item.name: item for item in found.variants[variant].gates}


@pytest.mark.parametrize("kind", ["measurements", "qualities"])
def test_a_result_of_another_profile_is_refused(kind: str) -> None:
    results = getattr(sample_results.sample_results(), kind)
    other = results["awq"].model_copy(update={"profile": "demo-full"})
    with pytest.raises(
        UserInputError, match=r"awq: its (measurement|quality) is of the profile demo-full, not of demo"
    ):
        verdict(**{kind: {**results, "awq": other}})


def test_every_variant_is_there_in_the_profiles_order() -> None:
    found = verdict()
    assert list(found.variants) == list(INTENTS)
    assert (found.profile, found.reference, found.control) == ("demo", "bf16", "bf16-again")
    for variant in found.variants.values():
        assert variant.decision == decide(variant.gates)


def test_the_ladder() -> None:
    """The sample's pools hold 13, 13, 26, 26 and 52 sequences; 24 are required."""
    found = verdict()
    decisions = {name: gates_of(found, name)["capacity"].decision for name in INTENTS}
    assert decisions == dict(zip(INTENTS, ["NO-GO", "NO-GO", "GO", "GO", "GO"], strict=True))
    assert found.variants["bf16"].decision == "NO-GO"


def test_the_control_has_a_delta_that_covers_zero() -> None:
    delta = verdict().variants["bf16-again"].quality
    assert delta is not None and delta.delta_ci is not None
    assert delta.delta == 0.0 and delta.flips == 0
    assert delta.delta_ci[0] < 0.0 < delta.delta_ci[1]


def test_the_noise_floor_stands_beside_every_delta() -> None:
    for variant in verdict().variants.values():
        assert variant.quality is not None and variant.quality.noise_floor_flips == 0


def test_the_reference_has_no_interval_and_says_why() -> None:
    found = verdict()
    quality = found.variants["bf16"].quality
    assert quality is not None and quality.accuracy is not None
    assert (quality.delta, quality.delta_ci, quality.mcnemar_p) == (0.0, None, None)
    assert "by definition" in gates_of(found, "bf16")["quality"].why


def test_a_bad_variant_is_a_no_go_on_quality() -> None:
    """The sample's awq-fp8kv loses 31 and gains 7 of 300: −8 points."""
    found = verdict(policy=POLICY.model_copy(update={"quality_margin": 0.02}))
    assert gates_of(found, "awq-fp8kv")["quality"].decision == "NO-GO"
    assert gates_of(found, "awq")["quality"].decision == "INCONCLUSIVE"
    assert gates_of(found, "bf16-fp8kv")["quality"].decision == "GO"


def test_a_missing_measurement_is_inconclusive_and_null() -> None:
    found = verdict(measurements={"awq": None}, qualities={"awq": None})
    awq = found.variants["awq"]
    assert awq.decision == "INCONCLUSIVE"
    assert {item.decision for item in awq.gates} == {"INCONCLUSIVE"}
    assert (awq.capacity, awq.quality, awq.throughput, awq.provenance) == (None, None, None, None)


@pytest.mark.parametrize("missing", ["measurements", "qualities"])
def test_half_a_measurement_never_goes(missing: str) -> None:
    found = verdict(**{missing: {"bf16-fp8kv": None}})
    assert found.variants["bf16-fp8kv"].decision == "INCONCLUSIVE"


def test_without_the_reference_no_variant_goes_on_quality() -> None:
    found = verdict(qualities={"bf16": None})
    assert {gates_of(found, name)["quality"].decision for name in INTENTS} == {"INCONCLUSIVE"}


def test_a_control_that_drifts_takes_the_decision_from_all() -> None:
    results = sample_results.sample_results()
    again = results.qualities["bf16-again"]
    assert again is not None
    right = [sample for sample in again.samples if sample.correct][:20]
    drifted = [
        sample.model_copy(update={"correct": False, "chosen": (sample.target + 1) % 4})
        if sample in right
        else sample
        for sample in again.samples
    ]
    found = verdict(qualities={"bf16-again": again.model_copy(update={"samples": drifted})})
    others = [name for name in INTENTS if name != "bf16"]
    assert {gates_of(found, name)["quality"].decision for name in others} == {"INCONCLUSIVE"}
    delta = found.variants["awq"].quality
    assert delta is not None and delta.noise_floor_flips == 20


def test_no_control_is_shown_as_not_measured() -> None:
    quality = verdict(control=None).variants["awq"].quality
    assert quality is not None and quality.noise_floor_flips is None


Spoil = Callable[[list[Sample]], list[Sample]]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "fewer items": (lambda found: found[:-3], "different items can't be compared: only the reference has"),
    "an item twice": (lambda found: [*found, found[0]], "items twice"),
    "one item": (lambda found: found[:1], "different items"),
    "no item": (lambda found: [], "no eval samples"),
    "another prompt": (
        lambda found: [found[0].model_copy(update={"prompt_hash": "x"}), *found[1:]],
        "different prompts can't be compared",
    ),
    "another target": (
        lambda found: [found[0].model_copy(update={"target_hash": "x"}), *found[1:]],
        "different targets can't be compared",
    ),
    "no number": (
        lambda found: [found[0].model_copy(update={"loglikelihoods": [math.nan] * 4}), *found[1:]],
        "scores that are no numbers",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_cant_be_paired_is_inconclusive_with_the_reason_and_spares_the_others(name: str) -> None:
    spoil, says = SPOILED[name]
    results = sample_results.sample_results()
    own = results.qualities["bf16-fp8kv"]
    assert own is not None
    found = verdict(qualities={"bf16-fp8kv": own.model_copy(update={"samples": spoil(own.samples)})})
    gate = gates_of(found, "bf16-fp8kv")["quality"]
    assert gate.decision == "INCONCLUSIVE" and says in gate.why
    assert found.variants["bf16-fp8kv"].decision == "INCONCLUSIVE"
    assert found.variants["bf16-fp8kv"].quality is None
    assert gates_of(found, "bf16-again")["quality"].decision == "GO"


def test_runs_over_another_eval_set_are_refused() -> None:
    results = sample_results.sample_results()
    awq = results.qualities["awq"]
    assert awq is not None
    found = verdict(qualities={"awq": awq.model_copy(update={"sample_seed": awq.sample_seed + 1})})
    gate = gates_of(found, "awq")["quality"]
    assert gate.decision == "INCONCLUSIVE"
    assert "eval set or its sample changed between the runs of bf16 and awq" in gate.why


def test_a_control_over_other_items_takes_the_floor_away_and_nothing_else() -> None:
    results = sample_results.sample_results()
    again = results.qualities["bf16-again"]
    assert again is not None
    found = verdict(qualities={"bf16-again": again.model_copy(update={"samples": again.samples[:-1]})})
    fp8 = found.variants["bf16-fp8kv"].quality
    assert fp8 is not None and fp8.flips == 3 and fp8.noise_floor_flips is None
    assert gates_of(found, "bf16-fp8kv")["quality"].decision == "GO"


@pytest.mark.parametrize(("right", "says"), [(True, "right on all 300"), (False, "wrong on all 300")])
def test_a_set_that_scores_everything_alike_decides_nothing(right: bool, says: str) -> None:
    results = sample_results.sample_results()
    alike = {}
    for name, quality in results.qualities.items():
        assert quality is not None
        samples = [sample.model_copy(update={"correct": right}) for sample in quality.samples]
        alike[name] = quality.model_copy(update={"samples": samples})
    found = verdict(qualities=alike)
    gate = gates_of(found, "bf16-fp8kv")["quality"]
    assert gate.decision == "INCONCLUSIVE" and says in gate.why


def test_a_reference_that_guesses_decides_nothing() -> None:
    """75 of 300 right with four choices: whatever a variant does, no ability is lost."""
    results = sample_results.sample_results()
    guessing = {}
    for name, quality in results.qualities.items():
        assert quality is not None
        samples = [s.model_copy(update={"correct": i % 4 == 0}) for i, s in enumerate(quality.samples)]
        guessing[name] = quality.model_copy(update={"samples": samples})
    gate = gates_of(verdict(qualities=guessing), "awq")["quality"]
    assert gate.decision == "INCONCLUSIVE" and "isn't above guessing (25%)" in gate.why


def test_a_sequential_run_is_judged_at_its_look() -> None:
    """Both hold what the stage leaves: the reference everything, the variant the items up to the look that decided."""
    results = sample_results.sample_results()
    stopped = {}
    for name, quality in results.qualities.items():
        assert quality is not None
        kept = quality.samples[:200] if name == "bf16-fp8kv" else quality.samples
        stopped[name] = quality.model_copy(update={"samples": kept, "looks": 3})
    found = verdict(qualities=stopped)
    delta = found.variants["bf16-fp8kv"].quality
    assert delta is not None and (delta.n, delta.look, delta.planned_looks) == (200, 2, [100, 200, 300])
    assert gates_of(found, "bf16-fp8kv")["quality"].decision == "GO"
    broken = stopped | {"awq": stopped["awq"].model_copy(update={"samples": stopped["awq"].samples[:150]})}
    assert "none of the planned looks" in gates_of(verdict(qualities=broken), "awq")["quality"].why


def test_unknown_reference_is_refused() -> None:
    with pytest.raises(UserInputError, match="reference 'fp16'"):
        verdict(reference="fp16")


def test_throughput_ratio_and_emulation() -> None:
    found = verdict()
    throughput = found.variants["awq"].throughput
    assert throughput is not None and throughput.emulated
    reference = found.variants["bf16"].throughput
    assert reference is not None and reference.ratio_to_reference == pytest.approx(1.0)
    assert throughput.peak_output_tok_s is not None and reference.peak_output_tok_s is not None
    assert throughput.ratio_to_reference == pytest.approx(
        throughput.peak_output_tok_s / reference.peak_output_tok_s
    )
    assert [row["concurrency"] for row in throughput.levels] == list(sample_results.LEVELS)
    without = verdict(measurements={"bf16": None}).variants["awq"].throughput
    assert without is not None and without.ratio_to_reference is None


def test_real_speed_gates_and_emulated_doesnt() -> None:
    slo = Slo(ttft_ms=100, tpot_ms=10, percentile=0.9, confidence=0.99)
    policy = POLICY.model_copy(update={"slo": slo})
    slow = [RequestLatency(concurrency=40, ttft_ms=900.0, tpot_ms=90.0)] * 60
    plain = sample_results.measurement("bf16-fp8kv")
    plain = plain.model_copy(update={"provenance": plain.provenance.model_copy(update={"emulated": []})})
    common: dict[str, Any] = {
        "measurements": {"bf16-fp8kv": plain},
        "requests": {"bf16-fp8kv": slow},
        "policy": policy,
    }
    real = verdict(**common, device_emulated=False)
    assert gates_of(real, "bf16-fp8kv")["latency-ttft"].gating
    assert real.variants["bf16-fp8kv"].decision == "NO-GO"
    emulated = verdict(**common, device_emulated=True)
    assert not gates_of(emulated, "bf16-fp8kv")["latency-ttft"].gating
    assert emulated.variants["bf16-fp8kv"].decision == "GO"


@pytest.mark.parametrize(
    "bad",
    [
        {"quality_margin": 2.0},
        {"required_sequences": 0},
        {"confidence": 0.4},
        {"minimum_completed": 0.0},
        {"margin": 0.02},
    ],
)
def test_policy_refuses_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Policy(**({"required_sequences": 24, "quality_margin": 0.02, "confidence": 0.95} | bad))


def test_further_tasks_have_a_gate_and_a_margin_of_their_own() -> None:
    """The sample's variants answer the short task alike, but 40 items of 14 sources exclude nothing under 22 points."""
    gates = gates_of(verdict(), "awq")
    assert (gates["quality"].limit, gates["quality-team_demo_short"].limit) == (-0.05, -0.25)
    assert gates["quality-team_demo_short"].decision == "GO"
    strict = verdict(policy=POLICY.model_copy(update={"task_margins": {}}))
    assert gates_of(strict, "awq")["quality-team_demo_short"].decision == "INCONCLUSIVE"
    assert strict.variants["awq"].decision == "INCONCLUSIVE"
    assert gates_of(strict, "bf16")["quality-team_demo_short"].decision == "GO"


def test_a_further_task_that_wasnt_scored_is_inconclusive() -> None:
    awq = sample_results.quality("awq").model_copy(update={"further": {}})
    gate = gates_of(verdict(qualities={"awq": awq}), "awq")["quality-team_demo_short"]
    assert gate.decision == "INCONCLUSIVE" and "wasn't scored on the task" in gate.why


def test_texts_are_compared_by_their_perplexity() -> None:
    def texts(loss: float, **changes: Any) -> list[RollingText]:
        return [
            RollingText(
                id=f"t{i}",
                slice="s",
                cluster=f"c{i}",
                doc_hash=f"h{i}",
                loglikelihood=-100.0 - loss * i,
                utf8_bytes=50,
            ).model_copy(update=changes)
            for i in range(9)
        ]

    def with_texts(name: str, found: list[RollingText]) -> Quality:
        scores = sample_results.further(name).model_copy(update={"samples": [], "texts": found})
        return sample_results.quality(name).model_copy(update={"further": {"prose": scores}})

    found = verdict(
        qualities={
            "bf16": with_texts("bf16", texts(0.0)),
            "awq": with_texts("awq", texts(1.0)),
            "awq-fp8kv": with_texts("awq-fp8kv", texts(1.0, doc_hash="other")),
        }
    )
    ratio = found.variants["awq"].perplexity_ratios["prose"]
    assert ratio.value == pytest.approx(math.exp(36 / 450)) and ratio.ci is not None
    assert ratio.ci[0] < ratio.value < ratio.ci[1]
    assert "quality-prose" not in gates_of(found, "awq")
    refused = gates_of(found, "awq-fp8kv")["quality-prose"]
    assert refused.decision == "INCONCLUSIVE" and "different texts" in refused.why
