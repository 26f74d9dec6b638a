"""What the engine says about itself, read from its log and its `/metrics` page.

Both are read because either can be wrong: in vLLM 0.26 `vllm:cache_config_info` could disagree with the log (issue 50456).
`reported_capacity` fails on a disagreement instead of choosing. Patterns cover vLLM 0.19 to 0.33.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import EngineFailedError
from pipeline.serving.engine_probe import MARK

NUMBER = r"([\d,]+(?:\.\d+)?)"
PLUGIN_MARK = "quantgate-cpu-plugin:"
PLUGIN_MODULE = "pipeline.serving.cpu_plugin"

# vLLM 0.19-0.26 print two lines, later versions one; the pool is called GPU, CPU or "GPU + host" (v1/core/kv_cache_utils.py).
POOL = re.compile(rf"(?:GPU|CPU|XPU|TPU|HPU)(?: \+ host)? KV cache size: {NUMBER} tokens")
CONCURRENCY = re.compile(rf"Maximum concurrency for {NUMBER} tokens per request: {NUMBER}x")
VERSION = re.compile(r"Initializing a V1 LLM engine \(v([^)]+)\)")
CONFIG_VALUE = r"[(, ]{name}=([^,)\s]+)"
ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend\b(?! for)")
# "Using" for integers, "Selected" for 8-bit floats (0.32 kernels/linear/__init__.py).
LINEAR = re.compile(r"(?:Using|Selected) (\w*Kernel) for ")
# Where AWQ layers run on the slow kernels: 0.19 says awq_marlin.py, later versions auto_awq.py.
AWQ_FALLBACK = re.compile(r"is not supported by (?:Auto)?AWQMarlin\. Falling back to unoptimized AWQ kernels")
AWQ_FORCED = re.compile(r"you specified quantization=awq explicitly, so forcing awq")
SLOW_AWQ = "AWQLinearMethod"
# v1/sample/ops/topk_topp_sampler.py: flashinfer_sampler_supported; said on a card only.
SAMPLERS = {
    "flashinfer": re.compile(r"Using FlashInfer for top-p & top-k sampling"),
    "vllm": re.compile(r"FlashInfer top-p/top-k sampling (?:disabled|unavailable)"),
}
# v1/worker/gpu_model_runner.py, v1/worker/gpu_worker.py and v1/worker/cpu_worker.py; all in GiB.
MEMORY = {
    "model_loading_gib": re.compile(rf"Model loading took {NUMBER} GiB"),
    "available_kv_cache_gib": re.compile(rf"Available KV cache memory: {NUMBER} GiB"),
    "explicit_kv_cache_gib": re.compile(rf"Explicitly set \({NUMBER}/{NUMBER}\) GiB for KV cache"),
    "weights_gib": re.compile(rf"Actual usage is {NUMBER} GiB for weight,"),
    "consumed_gib": re.compile(rf"Actual usage is {NUMBER} GiB for consumed memory"),
    "activation_gib": re.compile(rf"{NUMBER} GiB for peak activation"),
    "non_torch_gib": re.compile(rf"{NUMBER} GiB for non-torch memory"),
    "cuda_graphs_gib": re.compile(rf"{NUMBER} GiB for CUDAGraph memory"),
}
# What the graphs were expected to take (v1/worker/gpu_worker.py; only the older model runner has the second line), and that
# the expectation was taken off the KV cache: off by default in 0.19, on from 0.20.
GRAPHS_ESTIMATED = (
    re.compile(rf"CUDA graph pool memory: {NUMBER} GiB \(actual\), {NUMBER} GiB \(estimated\)"),
    re.compile(rf"Estimated CUDA graph memory: {NUMBER} GiB total"),
)
GRAPHS_COUNTED = "CUDA graph memory profiling is enabled"


@dataclass(frozen=True)
class LogSignals:
    """What a server's log says. None: it doesn't say."""

    version: str | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    at_tokens: int | None
    attention_backend: str | None
    weights_kernel: str | None
    kv_cache_dtype: str | None
    kv_scales: str | None
    plugin: str | None
    emulated: tuple[str, ...]
    kv_scales_by_layer: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Attention layer's name in the engine -> its scales of keys and values; empty: the engine's log doesn't name them."""
    kv_scales_apart: tuple[str, ...] = ()
    """Layers that would give one kernel other scales than another."""
    memory_gib: dict[str, float] = field(default_factory=dict)
    kv_skipped_layers: int = 0
    """Layers that keep 16 bits beside a quantized cache."""
    sampler: str | None = None
    """What top-k and top-p sampling runs on: 'flashinfer' or 'vllm'."""

    @property
    def kv_rounding(self) -> str | None:
        """How a CPU rounds to an FP8 cache: 'nearest' as the plugin does, or what it found the stock kernel to do."""
        if not (self.kv_cache_dtype or "").startswith("fp8"):
            return None
        if "fp8_kv_attention" in self.emulated:
            return "nearest"
        found = re.search(r"fp8_kv_rounding=(\S+)", self.plugin or "")
        return None if found is None else found[1]


def parse_log(text: str) -> LogSignals:
    """Read a server's log, whole or partial. Later lines win, as the engine itself overwrites its settings."""
    tokens, concurrency = _last(POOL, text), _last(CONCURRENCY, text)
    probe = _probe(text)
    plugin = _after_mark(PLUGIN_MARK, text)
    kv_dtype, skipped = _kv_dtype(probe.get("kv_cache_dtype"))
    kv_dtype = kv_dtype or _config(text, "kv_cache_dtype")
    return LogSignals(
        version=_group(VERSION, text),
        kv_cache_tokens=None if tokens is None else int(tokens[0].replace(",", "")),
        max_concurrency=None if concurrency is None else _float(concurrency[1]),
        at_tokens=None if concurrency is None else int(concurrency[0].replace(",", "")),
        attention_backend=_one(probe.get("attention_backend")) or _group(ATTENTION, text),
        weights_kernel=_weights_kernel(probe, text),
        kv_cache_dtype=kv_dtype,
        kv_skipped_layers=skipped,
        kv_scales=_kv_scales(kv_dtype, probe, text),
        plugin=plugin,
        emulated=_emulated(plugin, kv_dtype, probe),
        kv_scales_by_layer={name: (k, v) for name, (k, v) in probe.get("kv_scales", {}).items()},
        kv_scales_apart=tuple(probe.get("kv_scales_apart", ())),
        memory_gib=_memory(text),
        sampler=next((name for name, pattern in SAMPLERS.items() if pattern.search(text)), None),
    )


def _memory(text: str) -> dict[str, float]:
    """The terms of the card's budget, so that weights, activation, non-torch and graphs are what the KV cache went without.

    The graphs' term is the estimate where the engine took that off the budget; what capturing them really took is then
    `cuda_graphs_taken_gib`. Since 0.27 the estimate is inside what it calls peak activation (v1/worker/gpu_worker.py:
    peak_activation_memory), and is taken out of it here.
    """
    found = {name: _float(match[0]) for name, pattern in MEMORY.items() if (match := _last(pattern, text))}
    estimated = next((_float(match[-1]) for p in GRAPHS_ESTIMATED if (match := _last(p, text))), None)
    if estimated is None or GRAPHS_COUNTED not in text:
        return found
    if "cuda_graphs_gib" in found:
        found["cuda_graphs_taken_gib"] = found["cuda_graphs_gib"]
    found["cuda_graphs_gib"] = estimated
    if "consumed_gib" in found and "activation_gib" in found:
        found["activation_gib"] = round(max(0.0, found["activation_gib"] - estimated), 4)
    return found


def _last(pattern: re.Pattern[str], text: str) -> tuple[str, ...] | None:
    found = list(pattern.finditer(text))
    return found[-1].groups() if found else None


def _group(pattern: re.Pattern[str], text: str) -> str | None:
    found = _last(pattern, text)
    return None if found is None else found[0]


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _config(text: str, name: str) -> str | None:
    """A value of the engine's own configuration line."""
    for line in reversed(text.splitlines()):
        if "Initializing a V1 LLM engine" in line:
            found = re.search(CONFIG_VALUE.format(name=name), line)
            return None if found is None else found[1]
    return None


def _after_mark(mark: str, text: str) -> str | None:
    lines = [line.split(mark, 1)[1].strip() for line in text.splitlines() if mark in line]
    return lines[-1] if lines else None


def _probe(text: str) -> dict[str, Any]:
    """The engine probe's object (see `engine_probe.describe`), {} when it isn't there."""
    line = _after_mark(MARK, text)
    if line is None or not line.startswith("{"):
        return {}
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _one(counts: dict[str, int] | None) -> str | None:
    """The single name of a layer count, or all of them joined when layers differ."""
    return "+".join(sorted(counts)) if counts else None


def _kv_dtype(counts: dict[str, int] | None) -> tuple[str | None, int]:
    """The cache's dtype, and the layers that were left at 16 bits where the others have another."""
    wide = {"bfloat16", "float16"} & set(counts or {})
    if counts and len(counts) == 2 and len(wide) == 1:
        (name,) = wide
        return next(other for other in counts if other != name), counts[name]
    return _one(counts), 0


def _weights_kernel(probe: dict[str, Any], text: str) -> str | None:
    """The quantized layers' kernels, joined where there are several; None when no layer is quantized, or none is named."""
    if "linear" in probe:
        names = {name.rsplit(".", 1)[1] for name in probe["linear"] if "Unquantized" not in name}
    elif AWQ_FORCED.search(text):
        names = {SLOW_AWQ}
    else:
        named = _group(LINEAR, text)
        names = ({named} if named else set()) | ({SLOW_AWQ} if AWQ_FALLBACK.search(text) else set())
    return "+".join(sorted(names)) or None


def _kv_scales(kv_dtype: str | None, probe: dict[str, Any], text: str) -> str | None:
    if kv_dtype is None or not kv_dtype.startswith("fp8"):
        return None
    if kv_dtype.endswith("_per_token_head"):
        return None  # found token by token as they are written: there is no scale to bring or to miss
    lowest, highest = probe.get("kv_scale_min"), probe.get("kv_scale_max")
    if lowest is not None and highest is not None:
        return "1.0" if lowest == highest == 1.0 else "checkpoint"
    if "Using KV cache scaling factor 1.0" in text or _config(text, "quantization") in (
        "None",
        "awq",
        "awq_marlin",
        "auto_awq",
    ):
        return "1.0"  # vLLM looks for scales only where the quantization method knows them (layers/attention/attention.py)
    return None


def _emulated(plugin: str | None, kv_dtype: str | None, probe: dict[str, Any]) -> tuple[str, ...]:
    """The parts that ran in our plugin instead of a stock kernel."""
    parts = []
    if any(PLUGIN_MODULE in name for name in probe.get("linear", {})):
        parts.append("int4_awq_linear")
    quantized_kv = kv_dtype is not None and kv_dtype.startswith("fp8")
    if quantized_kv and any(PLUGIN_MODULE in name for name in probe.get("attention", {})):
        parts.append("fp8_kv_attention")
    if not probe and plugin is not None and plugin.startswith("active"):
        parts = [found for found in re.findall(r"(\w+)=emulated", plugin)]
    return tuple(parts)


# --- metrics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricsSnapshot:
    """One reading of `/metrics`. Counts are sums over engines; `kv_usage` is 0..1 of the usable blocks."""

    running: int | None
    waiting: int | None
    kv_usage: float | None
    preemptions_total: int | None
    prefix_queries: int | None
    prefix_hits: int | None
    prompt_tokens_total: int | None
    generation_tokens_total: int | None
    kv_cache_size_tokens: int | None
    kv_cache_max_concurrency: float | None
    num_gpu_blocks: int | None
    block_size: int | None
    cache_dtype: str | None


COUNTS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions_total": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens_total": "vllm:prompt_tokens_total",
    "generation_tokens_total": "vllm:generation_tokens_total",
}
SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> MetricsSnapshot:
    """Read a `/metrics` page (Prometheus text format 0.0.4). Names that aren't on it give None."""
    values: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None:
            continue
        name, label_text, value = found.groups()
        if name == "vllm:cache_config_info":
            labels = dict(LABEL.findall(label_text or ""))
        else:
            values.setdefault(name, []).append(float(value))
    counts = {key: int(sum(values[name])) if name in values else None for key, name in COUNTS.items()}
    usage = values.get("vllm:kv_cache_usage_perc")
    return MetricsSnapshot(
        **counts,
        kv_usage=None if usage is None else max(usage),
        kv_cache_size_tokens=_label_int(labels, "kv_cache_size_tokens"),
        kv_cache_max_concurrency=_label_float(labels, "kv_cache_max_concurrency"),
        num_gpu_blocks=_label_int(labels, "num_gpu_blocks"),
        block_size=_label_int(labels, "block_size"),
        cache_dtype=labels.get("cache_dtype"),
    )


def _label_float(labels: dict[str, str], name: str) -> float | None:
    try:
        return float(labels[name])
    except (KeyError, ValueError):
        return None


def _label_int(labels: dict[str, str], name: str) -> int | None:
    value = _label_float(labels, name)
    return None if value is None else int(value)


# --- capacity -----------------------------------------------------------------------------------------------------


def reported_capacity(log: LogSignals, metrics: MetricsSnapshot) -> tuple[int, float]:
    """(tokens, sequences of max_model_len) that the engine says it has room for.

    Raises `EngineFailedError` where the log doesn't say, or where the metrics contradict it. Metrics without the labels (before
    0.26) are checked as blocks x block size.
    """
    if log.kv_cache_tokens is None or log.max_concurrency is None:
        raise EngineFailedError("the engine's log holds no KV cache size, so its capacity isn't known")
    tokens = metrics.kv_cache_size_tokens
    if tokens is None and metrics.num_gpu_blocks is not None and metrics.block_size is not None:
        tokens = metrics.num_gpu_blocks * metrics.block_size
    if tokens is None:
        raise EngineFailedError("the engine's metrics hold no KV cache size to check its log against")
    if tokens != log.kv_cache_tokens:
        raise EngineFailedError(
            f"the engine contradicts itself: {log.kv_cache_tokens} KV cache tokens in its log, {tokens} in its metrics"
        )
    sequences = metrics.kv_cache_max_concurrency
    # The log rounds to two digits.
    if sequences is not None and not math.isclose(sequences, log.max_concurrency, abs_tol=0.0051):
        raise EngineFailedError(
            f"the engine contradicts itself: {log.max_concurrency} sequences in its log, {sequences} in its metrics"
        )
    return log.kv_cache_tokens, log.max_concurrency
