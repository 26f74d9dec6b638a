"""Made-up parts of a measurement for tests of what reads them."""

from __future__ import annotations

from typing import Any

from pipeline.results import FillTest, Probe, SloSearch


def fill_test(**changes: Any) -> FillTest:
    """A fill test that found what was predicted."""
    values: dict[str, Any] = {
        "cell": "fill",
        "prompt_tokens": 488,
        "output_tokens": 24,
        "offered": 12,
        "predicted_running": 8,
        "observed_peak_running": 8,
        "waiting_at_peak": 4,
        "observed_peak_kv_usage": 0.94,
        "preemptions": 0,
        "agrees": True,
        "note": "8 of 12 ran at once, 4 waited; 8 were predicted",
        "start_s": 5000.0,
        "end_s": 5010.0,
    }
    return FillTest(**(values | changes))


def probe(load: float, **changes: Any) -> Probe:
    """A probe of a closed loop that passed."""
    values: dict[str, Any] = {
        "cell": f"closed-{load:g}",
        "load": load,
        "decision": "pass",
        "judged": 14,
        "over_ttft": 0,
        "over_tpot": 0,
        "requests": 30,
        "failed": 0,
        "ttft_ms": 640.0,
        "tpot_ms": 210.0,
        "duration_s": 7.5,
        "client_cpu_share": 0.05,
        "client_saturated": False,
    }
    return Probe(**(values | changes))


def slo_search(*probes: Probe, **changes: Any) -> SloSearch:
    """A closed-loop search that ended at 16 of 20 streams."""
    values: dict[str, Any] = {
        "mode": "closed",
        "unit": "streams",
        "ttft_ms": 2000.0,
        "tpot_ms": 100.0,
        "percentile": 0.9,
        "confidence": 0.95,
        "low": 16,
        "high": 19,
        "note": "the SLO holds at 16 streams and breaks at 20; between the two it isn't decided",
        "probes": list(probes),
        "requests": sum(item.requests for item in probes),
        "duration_s": 40.0,
    }
    return SloSearch(**(values | changes))
