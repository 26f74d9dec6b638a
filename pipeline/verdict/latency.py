"""The latency gates: TTFT and TPOT of single requests against the SLO, by a bound that knows its sample size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.load.bounds import latency_bound, requests_needed
from pipeline.load.metrics import percentile, tpot_s, ttft_s
from pipeline.load.records import RequestRecord
from pipeline.results import Gate, Measurement
from pipeline.verdict.policy import Policy, Slo
from pipeline.verdict.rule import Rule


@dataclass(frozen=True)
class RequestLatency:
    """One request at one load level. Times in ms, None where the request failed (then it misses every limit)."""

    concurrency: int
    ttft_ms: float | None
    tpot_ms: float | None


def request_latencies(measurement: Measurement, records: Sequence[RequestRecord]) -> list[RequestLatency]:
    """The measured requests of the levels, by the load's own definitions. Warm-up, fill test and probes are left out."""
    cells = {level.cell: level.concurrency for level in measurement.levels}
    return [
        request_latency(record, cells[record.cell])
        for record in records
        if record.cell in cells and not record.warmup and record.outcome != "stopped"
    ]


def request_latency(record: RequestRecord, concurrency: int) -> RequestLatency:
    """One request as the gates see it."""
    if not record.completed:
        return RequestLatency(concurrency, None, None)
    return RequestLatency(concurrency, ttft_s(record) * 1000, tpot_s(record) * 1000)


def latency_gates(
    measurement: Measurement | None,
    requests: Sequence[RequestLatency] | None,
    policy: Policy,
    emulated: Sequence[str],
) -> list[Gate]:
    """TTFT and TPOT against the SLO at the lowest level that asks for the required sequences; none without an SLO.

    `emulated` names what wasn't real about the speed (plugin kernels, a memory budget instead of a card). If anything, the
    gates show what they found and don't count, unless the policy says so.
    """
    slo = policy.slo
    if slo is None:
        return []
    ttft, tpot = Rule("latency-ttft", slo.ttft_ms, "ms"), Rule("latency-tpot", slo.tpot_ms, "ms")
    level = None
    if measurement is not None:
        asked = (item.concurrency for item in measurement.levels)
        level = min((item for item in asked if item >= policy.required_sequences), default=None)
    if measurement is None or requests is None:
        why = "per-request latencies were not measured"
        gates = [ttft.cannot_run(why), tpot.cannot_run(why)]
    elif level is None:
        why = f"no load level asks for {policy.required_sequences} sequences at once"
        gates = [ttft.cannot_run(why), tpot.cannot_run(why)]
    else:
        at_level = [request for request in requests if request.concurrency == level]
        gates = [
            _bounded(ttft, [request.ttft_ms for request in at_level], slo, level),
            _bounded(tpot, [request.tpot_ms for request in at_level], slo, level),
        ]
    if not emulated or policy.allow_emulated_speed_gate:
        return gates
    note = f"not gated, the speed is emulated ({', '.join(emulated)}): "
    return [gate.model_copy(update={"gating": False, "why": note + gate.why}) for gate in gates]


def _bounded(rule: Rule, values_ms: Sequence[float | None], slo: Slo, level: int) -> Gate:
    """Pass, fail or undecided, with the observed percentile as the value."""
    limit = rule.limit if rule.limit is not None else math.inf
    n, over = len(values_ms), sum(1 for value in values_ms if value is None or value > limit)
    if n == 0:
        return rule.cannot_run(f"no request is recorded at concurrency {level}")
    label = f"p{slo.percentile * 100:g} {rule.name.removeprefix('latency-').upper()}"
    found = f"{over} of {n} requests over {limit:g} ms at concurrency {level}"
    observed = percentile_ms(values_ms, slo.percentile)
    bound = latency_bound(n, over, slo.percentile, slo.confidence)
    if bound == "pass":
        return rule.says("GO", observed, f"{found}: {label} is within it at {slo.confidence:.0%} confidence")
    if bound == "fail":
        return rule.says(
            "NO-GO", observed, f"{found}: {label} is above it at {slo.confidence:.0%} confidence"
        )
    if over / n <= 1 - slo.percentile:
        needed = requests_needed(slo.percentile, over, slo.confidence)
        return rule.cannot_run(
            f"{found}: too few to claim {label}; {needed} with no more over it would do", observed
        )
    return rule.cannot_run(f"{found}: too close to call {label}", observed)


def percentile_ms(values: Sequence[float | None], share: float) -> float | None:
    """Nearest-rank percentile with failed requests as +infinity; None where it falls on one, or on nothing."""
    ordered = sorted(math.inf if value is None else value for value in values)
    if not ordered:
        return None
    found = float(percentile(ordered, share))
    return None if math.isinf(found) else found
