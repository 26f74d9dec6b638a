"""The latency gates: bound by bound, the level they look at, and emulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeline.load.records import RequestRecord
from pipeline.results import Measurement
from pipeline.verdict.latency import (
    RequestLatency,
    latency_gates,
    percentile_ms,
    request_latencies,
    request_latency,
)
from pipeline.verdict.policy import Policy, Slo
from tests.support import load_records, sample_results

SLO = Slo(ttft_ms=2000, tpot_ms=100, percentile=0.9, confidence=0.99)
POLICY = Policy(required_sequences=24, quality_margin=0.02, confidence=0.95, slo=SLO)


def requests(n: int, over: int = 0, failed: int = 0, concurrency: int = 40) -> list[RequestLatency]:
    """`n` requests of 100 ms TTFT and 20 ms TPOT; the first ones over the TTFT limit or failed."""
    ttfts: list[float | None] = [None] * failed + [9000.0] * over
    ttfts += [100.0] * (n - len(ttfts))
    return [
        RequestLatency(concurrency=concurrency, ttft_ms=value, tpot_ms=None if value is None else 20.0)
        for value in ttfts
    ]


def measurement(*concurrencies: int) -> Measurement:
    base = sample_results.measurement("awq")
    levels = [base.levels[0].model_copy(update={"concurrency": c}) for c in concurrencies]
    return base.model_copy(update={"levels": levels})


@pytest.mark.parametrize(
    ("sent", "decision", "value"),
    [
        (requests(44), "GO", 100.0),  # p90 with none over: 44 requests at 99 % (MLPerf's early stopping)
        (requests(43), "INCONCLUSIVE", 100.0),
        (requests(64, over=1), "GO", 100.0),
        (requests(63, over=1), "INCONCLUSIVE", 100.0),
        (requests(64, failed=1), "GO", 100.0),  # a failure counts as one over
        (requests(50, over=20), "NO-GO", 9000.0),
        (requests(50, failed=20), "NO-GO", None),  # the percentile falls on a failure
        (requests(50, over=7), "INCONCLUSIVE", 9000.0),
        ([], "INCONCLUSIVE", None),
        (None, "INCONCLUSIVE", None),
    ],
)
def test_ttft(sent: list[RequestLatency] | None, decision: str, value: float | None) -> None:
    ttft, _ = latency_gates(measurement(40), sent, POLICY, emulated=[])
    assert (ttft.name, ttft.decision, ttft.value, ttft.limit) == ("latency-ttft", decision, value, 2000.0)
    assert ttft.gating


def test_tpot_has_its_own_limit() -> None:
    slow = [RequestLatency(concurrency=40, ttft_ms=100.0, tpot_ms=150.0)] * 60
    ttft, tpot = latency_gates(measurement(40), slow, POLICY, emulated=[])
    assert (ttft.decision, tpot.decision, tpot.value) == ("GO", "NO-GO", 150.0)


def test_too_few_requests_say_how_many_it_takes() -> None:
    ttft, _ = latency_gates(measurement(40), requests(30), POLICY, emulated=[])
    assert "too few" in ttft.why and "44 with no more over it" in ttft.why


def test_it_looks_at_the_lowest_level_that_asks_for_enough() -> None:
    sent = (
        requests(60, over=60, concurrency=16)
        + requests(60, concurrency=24)
        + requests(60, over=60, concurrency=56)
    )
    ttft, _ = latency_gates(measurement(16, 24, 56), sent, POLICY, emulated=[])
    assert ttft.decision == "GO" and "concurrency 24" in ttft.why


def test_a_load_that_never_asks_for_enough_is_inconclusive() -> None:
    gates = latency_gates(measurement(4, 16), requests(60, concurrency=16), POLICY, emulated=[])
    assert [gate.decision for gate in gates] == ["INCONCLUSIVE"] * 2


def test_emulated_speed_is_shown_and_doesnt_gate() -> None:
    gates = latency_gates(measurement(40), requests(60, over=60), POLICY, emulated=["int4_awq_linear"])
    assert [gate.gating for gate in gates] == [False, False]
    assert gates[0].decision == "NO-GO" and gates[0].why.startswith("not gated")
    assert "int4_awq_linear" in gates[0].why
    allowed = POLICY.model_copy(update={"allow_emulated_speed_gate": True})
    assert latency_gates(measurement(40), requests(60), allowed, emulated=["x"])[0].gating


def test_no_slo_no_gate() -> None:
    policy = POLICY.model_copy(update={"slo": None})
    assert latency_gates(measurement(40), requests(60), policy, emulated=[]) == []


@pytest.mark.parametrize(
    ("changes", "ttft_ms", "tpot_ms"),
    [
        ({}, 250.0, 50.0),
        ({"error": "HTTP 500"}, None, None),
        ({"output_tokens": 1}, 250.0, 0.0),
    ],
)
def test_request_latency(changes: dict[str, Any], ttft_ms: float | None, tpot_ms: float | None) -> None:
    """0.25 s to the first of 11 tokens, 0.75 s in all: ten gaps of 50 ms."""
    values: dict[str, Any] = {
        "cell": "level-24",
        "level": 24,
        "index": 0,
        "warmup": False,
        "scheduled_s": None,
        "chunk_tokens": (1,) * 11,
        "start_s": 100.0,
        "ttft_s": 0.25,
        "itls_s": (0.05,) * 10,
        "latency_s": 0.75,
        "input_tokens": 448,
        "output_tokens": 11,
        "requested_output_tokens": 11,
        "error": None,
    }
    found = request_latency(RequestRecord(**(values | changes)), 24)
    assert found == RequestLatency(concurrency=24, ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def test_only_the_levels_measured_requests_are_judged() -> None:
    """Not the warm-up, not what was stopped, and not the fill test or a probe of the same concurrency."""
    own = measurement(24)
    own = own.model_copy(update={"levels": [own.levels[0].model_copy(update={"cell": "level-24"})]})
    sent = [load_records.record(index, 0.0, 0.1, 0.01, level=24, cell="level-24") for index in range(3)]
    sent += [load_records.record(3, 0.0, 0.1, 0.01, level=24, cell="level-24", warmup=True)]
    sent += [load_records.record(4, 0.0, 0.1, 0.01, level=24, cell=cell) for cell in ("fill", "closed-24")]
    sent += [dataclasses.replace(sent[0], index=5, stopped=True)]
    found = request_latencies(own, sent)
    assert [(latency.concurrency, latency.ttft_ms) for latency in found] == [(24, pytest.approx(100))] * 3


@pytest.mark.parametrize(
    ("values", "percentile", "expected"),
    [
        ([5.0, 1.0, 3.0], 0.5, 3.0),
        ([float(v) for v in range(1, 101)], 0.99, 99.0),
        ([float(v) for v in range(1, 101)], 0.07, 7.0),
        ([1.0, None], 0.99, None),
        ([1.0, None], 0.5, 1.0),
        ([], 0.5, None),
    ],
)
def test_percentile(values: list[Any], percentile: float, expected: float | None) -> None:
    assert percentile_ms(values, percentile) == expected
