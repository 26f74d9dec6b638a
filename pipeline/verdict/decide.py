"""From every variant's gates to the verdict file's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import UserInputError
from pipeline.quality.divergence import ScoredStream
from pipeline.results import (
    Decision,
    Gate,
    Measurement,
    Quality,
    Throughput,
    VariantVerdict,
    Verdict,
)
from pipeline.verdict.gates import (
    capacity_agreement_gate,
    capacity_gate,
    concurrency_observed_gate,
    kernel_provenance_gate,
    load_completed_gate,
)
from pipeline.verdict.latency import RequestLatency, latency_gates
from pipeline.verdict.policy import Policy, VariantIntent
from pipeline.verdict.quality import quality_evidence, quality_gates


def decide(gates: Sequence[Gate]) -> Decision:
    """NO-GO if any gate is, else INCONCLUSIVE if any is (or there is none), else GO. Gates that don't gate don't count."""
    decisions = {gate.decision for gate in gates if gate.gating}
    if "NO-GO" in decisions:
        return "NO-GO"
    return "GO" if decisions == {"GO"} else "INCONCLUSIVE"


def build_verdict(
    *,
    profile: str,
    reference: str,
    control: str | None,
    intents: Mapping[str, VariantIntent],
    measurements: Mapping[str, Measurement | None],
    qualities: Mapping[str, Quality | None],
    requests: Mapping[str, Sequence[RequestLatency] | None],
    policy: Policy,
    device_emulated: bool,
    streams: Mapping[str, ScoredStream | None] | None = None,
) -> Verdict:
    """The verdict over `intents`' variants, in that order. A result that is missing from a mapping or None was not measured.

    `UserInputError` where reference or control isn't a variant, and where a result is of another profile.
    """
    for variant, result in (*measurements.items(), *qualities.items()):
        if result is not None and result.profile != profile:
            raise UserInputError(
                f"{variant}: its {type(result).__name__.lower()} is of the profile {result.profile}, not of {profile}; "
                "run `dvc repro --force` for its stage"
            )
    for role, name in (("reference", reference), ("control", control)):
        if name is not None and name not in intents:
            raise UserInputError(f"{role} {name!r} isn't one of the variants ({', '.join(intents)})")
    evidence = {
        name: quality_evidence(name, reference, control, qualities, streams or {}, policy) for name in intents
    }
    floor = None if control is None else evidence[control]
    variants = {}
    for name, intent in intents.items():
        measurement, quality = measurements.get(name), qualities.get(name)
        provenances = [result.provenance for result in (measurement, quality) if result is not None]
        emulated = list(measurement.provenance.emulated) if measurement else []
        if device_emulated:
            emulated.append("the device is a memory budget, not a card")
        gates = [
            capacity_gate(measurement, policy),
            capacity_agreement_gate(measurement),
            load_completed_gate(measurement, policy),
            concurrency_observed_gate(measurement, policy),
            kernel_provenance_gate(intent, provenances),
            *quality_gates(evidence[name], floor, policy, is_reference=name == reference),
            *latency_gates(measurement, requests.get(name), policy, emulated),
        ]
        variants[name] = VariantVerdict(
            decision=decide(gates),
            gates=gates,
            capacity=measurement.capacity if measurement else None,
            quality=evidence[name].delta,
            divergence=evidence[name].divergence,
            further={task: found.delta for task, found in evidence[name].further.items() if found.delta},
            perplexity_ratios={
                task: found.perplexity_ratio
                for task, found in evidence[name].further.items()
                if found.perplexity_ratio
            },
            throughput=_throughput(measurement, measurements.get(reference), bool(emulated)),
            provenance=provenances[0] if provenances else None,
        )
    return Verdict(profile=profile, reference=reference, control=control, variants=variants)


def _throughput(
    measurement: Measurement | None, reference: Measurement | None, emulated: bool
) -> Throughput | None:
    """Peak output throughput over the load levels, and its ratio to the reference's peak."""
    if measurement is None:
        return None
    peak, at = _peak(measurement)
    base = _peak(reference)[0] if reference is not None else None
    return Throughput(
        peak_output_tok_s=peak,
        at_concurrency=at,
        ratio_to_reference=peak / base if peak is not None and base else None,
        emulated=emulated,
        levels=[_level_row(measurement, index) for index in range(len(measurement.levels))],
    )


def _peak(measurement: Measurement) -> tuple[float | None, int | None]:
    best = max(
        (
            (level.output_throughput_tok_s, level.concurrency)
            for level in measurement.levels
            if level.output_throughput_tok_s
        ),
        default=None,
    )
    return best if best is not None else (None, None)


def _level_row(measurement: Measurement, index: int) -> dict[str, Any]:
    level = measurement.levels[index]
    return {
        "concurrency": level.concurrency,
        "requests": level.requests,
        "failed": level.failed,
        "output_tok_s": level.output_throughput_tok_s,
        "ttft_p50_ms": level.ttft.p50_ms,
        "ttft_p99_ms": level.ttft.p99_ms,
        "tpot_p50_ms": level.tpot.p50_ms,
        "tpot_p99_ms": level.tpot.p99_ms,
        "peak_running": level.peak_running,
        "preemptions": level.preemptions,
    }
