"""Stage `measure`: the fill test, the load levels, the searches under the SLO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.results.machine import Provenance
from pipeline.results.plan import BudgetTerm, Capacity
from pipeline.results.record import Record
from pipeline.results.time import Phase


class Distribution(Record):
    """Percentiles in milliseconds of one latency metric, with the sample size they rest on."""

    n: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    needs: dict[str, int] = Field(
        default_factory=dict,
        description="percentile that the sample is too small for -> values it takes; its figure is null",
    )


class SteadyWindow(Record):
    """The part of a cell between ramp and drain. All null where there is none; `note` says why."""

    ramp_s: float | None = None
    steady_s: float | None = None
    drain_s: float | None = None
    output_throughput_tok_s: float | None = None
    total_throughput_tok_s: float | None = None
    request_throughput_rps: float | None = None
    goodput_rps: float | None = None
    note: str | None = None


class LoadLevel(Record):
    """One closed-loop load at one concurrency. Latencies are those of the requests after the warm-up."""

    cell: str = Field(default="", description="name of its records in the requests file")
    repeat: int = 1
    concurrency: int
    requests: int = Field(description="sent, warm-up included")
    warmup: int = 0
    stopped: int = 0
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_throughput_tok_s: float | None
    total_throughput_tok_s: float | None
    request_throughput_rps: float | None
    goodput_rps: float | None = Field(default=None, description="requests within the SLO, over the whole run")
    steady: SteadyWindow | None = None
    ttft: Distribution
    tpot: Distribution
    itl: Distribution = Field(description="per chunk")
    itl_per_token: Distribution | None = None
    itl_ecdf_ms: list[float | None] = Field(
        default_factory=list,
        description="ITL per chunk at shares 0, 0.05 … 1 of the sample, for the plot; null: never came",
    )
    e2el: Distribution
    peak_running: int | None
    peak_waiting: int | None
    peak_kv_usage: float | None = Field(description="0..1 of the usable blocks")
    preemptions: int | None
    prefix_cache_hit_rate: float | None
    client_cpu_share: float | None = Field(
        default=None, description="CPU seconds of the load's client per second"
    )


class FillTest(Record):
    """The pool driven full with sequences of known length: what ran at once, against the planner's number."""

    cell: str
    prompt_tokens: int
    output_tokens: int
    offered: int = Field(description="requests in flight, more than are predicted to fit")
    predicted_running: int | None = Field(
        description="the planner's whole sequences that fit, or the scheduler's limit where that is lower"
    )
    observed_peak_running: int | None
    waiting_at_peak: int | None = Field(description="in the queue while the peak ran")
    observed_peak_kv_usage: float | None = Field(description="0..1 of the usable blocks")
    preemptions: int | None
    agrees: bool | None = Field(
        description="observed within one sequence of predicted; null if either is missing"
    )
    note: str = Field(description="what was seen, and why where it isn't what was predicted")
    start_s: float = Field(description="on the timeline's clock")
    end_s: float


class Probe(Record):
    """One load of a search, judged against the SLO."""

    cell: str
    load: float = Field(description="concurrency, or requests a second")
    decision: Literal["pass", "fail", "undecided"]
    judged: int = Field(description="requests that had ended among those the decision rests on")
    over_ttft: int
    over_tpot: int
    requests: int = Field(description="sent, warm-up and stopped ones included")
    failed: int
    ttft_ms: float | None = Field(description="seen at the SLO's percentile; no claim, the decision is")
    tpot_ms: float | None
    duration_s: float
    schedule_lag_p99_ms: float | None = Field(default=None, description="open loop only")
    client_cpu_share: float | None = None
    client_saturated: bool | None = Field(
        default=None, description="true: the client couldn't keep up, so the probe says nothing of the server"
    )


class SloSearch(Record):
    """The largest load at which the SLO holds, as an interval."""

    mode: Literal["closed", "open"]
    unit: Literal["streams", "requests/s"]
    ttft_ms: float
    tpot_ms: float
    percentile: float
    confidence: float
    low: float | None = Field(description="largest load that passed; null if none did")
    high: float | None = Field(description="largest load not shown to fail; null if none failed")
    note: str
    probes: list[Probe]
    requests: int
    duration_s: float


class Measurement(Record):
    """`results/measure/<variant>.json`."""

    variant: str
    profile: str
    weights: str
    weight_bytes: int | None = Field(default=None, description="of the checkpoint, on the fullest rank")
    capacity: Capacity
    levels: list[LoadLevel]
    fill: FillTest | None = None
    searches: list[SloSearch] = Field(default_factory=list)
    requests_file: str
    timeline_file: str
    provenance: Provenance
    reconciliation: list[BudgetTerm] = Field(
        default_factory=list, description="the plan's terms with what the engine reported"
    )
    startup_s: float
    wall_s: float
    phases: list[Phase] = Field(default_factory=list, description="of wall_s; empty where nobody looked")


class MemoryRun(Record):
    """`runs/gpu-test/<profile>/<variant>.json`: one start on a card with random weights of the real geometry, its memory term by term."""

    kind: Literal["memory-run"] = "memory-run"
    variant: str
    profile: str
    weights: str
    weight_bytes: int | None = Field(description="of the checkpoint that the weights stand for, on one rank")
    capacity: Capacity
    reconciliation: list[BudgetTerm]
    provenance: Provenance
    startup_s: float
