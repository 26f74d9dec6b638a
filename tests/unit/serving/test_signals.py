"""The engine's log and metrics, read from recordings and from lines of other versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import EngineFailedError
from pipeline.serving.signals import LogSignals, parse_log, parse_metrics, reported_capacity
from tests.support.mock_vllm_wire import metrics_page, startup_log

RECORDED = Path(__file__).resolve().parents[2] / "contract" / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


# --- log ----------------------------------------------------------------------------------------------------------


def test_recorded_bf16_log() -> None:
    log = parse_log(recorded("log-0.32-cpu-bf16.txt"))
    assert log.version == "0.32.0"
    # 80 MiB at 23,040 B/token in blocks of 128: 28 whole blocks
    assert (log.kv_cache_tokens, log.max_concurrency, log.at_tokens) == (3584, 7.0, 512)
    assert log.attention_backend == "CPU_ATTN"
    assert log.kv_cache_dtype == "bfloat16"
    assert log.kv_scales is None
    assert log.weights_kernel is None
    assert log.emulated == ()
    assert log.memory_gib == {"explicit_kv_cache_gib": 0.08}


def test_recorded_fp8_log() -> None:
    """A plain checkpoint with an FP8 cache: no line about scales, yet they are 1.0."""
    text = recorded("log-0.32-cpu-fp8kv.txt")
    assert "scaling factor 1.0" not in text
    log = parse_log(text)
    assert (log.kv_cache_tokens, log.max_concurrency) == (7168, 14.0)
    assert log.kv_cache_dtype == "fp8"
    assert log.kv_scales == "1.0"


def test_fp8_log_without_the_probe_still_gives_the_scales_of_an_unquantized_checkpoint() -> None:
    lines = recorded("log-0.32-cpu-fp8kv.txt").splitlines()
    log = parse_log("\n".join(line for line in lines if "quantgate-provenance" not in line))
    assert log.kv_cache_dtype == "fp8"
    assert log.kv_scales == "1.0"
    assert log.attention_backend is None, "0.32 on a CPU doesn't name it"


def test_recorded_awq_log_on_stock_kernels() -> None:
    text = recorded("log-0.32-cpu-awq-fp8kv.txt")
    assert "scaling factor 1.0" not in text, (
        "AWQ checkpoints aren't asked for KV scales, so nothing is said of them"
    )
    log = parse_log(text)
    assert log.weights_kernel == "CPUWNA16LinearKernel"
    assert (log.kv_cache_dtype, log.kv_scales) == ("fp8", "1.0")
    assert log.plugin == "inactive (stock kernels)"
    assert log.emulated == ()
    assert log.kv_cache_tokens == 7168, "the pool's size doesn't depend on the weights"


def test_recorded_awq_log_with_the_plugin() -> None:
    log = parse_log(recorded("log-0.32-cpu-avx2-plugin-awq-fp8kv.txt"))
    assert log.weights_kernel == "Int4PackLinearKernel"
    assert (log.kv_cache_dtype, log.kv_scales) == ("fp8", "1.0")
    assert log.emulated == ("int4_awq_linear", "fp8_kv_attention")
    assert (log.kv_cache_tokens, log.max_concurrency) == (7168, 14.0), "emulated arithmetic, real pool size"


@pytest.mark.parametrize("name", ["log-0.32-cpu-awq-fp8kv.txt", "log-0.32-cpu-avx2-plugin-awq-fp8kv.txt"])
def test_stock_lines_and_probe_name_the_same(name: str) -> None:
    """What is left for a version whose internals the probe doesn't understand any more."""
    text = recorded(name)
    with_probe = parse_log(text)
    without = parse_log("\n".join(line for line in text.splitlines() if "quantgate-provenance" not in line))
    assert without.weights_kernel == with_probe.weights_kernel
    assert without.kv_cache_dtype == with_probe.kv_cache_dtype
    assert without.kv_scales == with_probe.kv_scales
    assert without.emulated == with_probe.emulated


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 0.19.0 on an H20, vllm issue 40691: two lines, a hybrid model
        (
            "INFO [kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens\n"
            "INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 33.04x\n",
            (290_864, 33.04, 32_768),
        ),
        # vllm pull request 13596 (0.7): the form of all versions up to 0.26
        (
            "INFO 02-19 23:56:55 kv_cache_utils.py:524] GPU KV cache size: 2,042,016 tokens\n"
            "INFO 02-19 23:56:55 kv_cache_utils.py:527] Maximum concurrency for 2,048 tokens per request: 997.08x\n",
            (2_042_016, 997.08, 2048),
        ),
        # one line, vllm issue 54662; versions before 0.32 say GPU on a CPU too
        (
            "INFO [kv_cache_utils.py:2312] GPU KV cache size: 23,296 tokens, Maximum concurrency for 4,096 tokens per "
            "request: 5.69x",
            (23_296, 5.69, 4096),
        ),
        # 0.32 with a host tier (v1/core/kv_cache_utils.py, update_kv_cache_capacity)
        (
            "(EngineCore pid=7) INFO [kv_cache_utils.py:2327] GPU + host KV cache size: 1,347,774 tokens, Maximum "
            "concurrency for 262,144 tokens per request: 5.14x",
            (1_347_774, 5.14, 262_144),
        ),
        (
            "CPU KV cache size: 896 tokens, Maximum concurrency for 896 tokens per request: 1.00x",
            (896, 1.0, 896),
        ),
        ("Running: 6 reqs, Waiting: 6 reqs, CPU KV cache usage: 88.9%", (None, None, None)),
    ],
)
def test_pool_lines_of_all_versions(text: str, expected: tuple[int | None, float | None, int | None]) -> None:
    log = parse_log(text)
    assert (log.kv_cache_tokens, log.max_concurrency, log.at_tokens) == expected


def test_memory_terms_of_a_cuda_log() -> None:
    """Texts of v1/worker/gpu_model_runner.py and gpu_worker.py, 0.19 (weight, non-torch) and 0.32 (consumed)."""
    old = parse_log(
        "Model loading took 5.2009 GiB memory and 3.1 seconds\nAvailable KV cache memory: 14.31 GiB\n"
        "Actual usage is 5.2 GiB for weight, 1.42 GiB for peak activation, 0.07 GiB for non-torch memory, and 0.41 GiB for "
        "CUDAGraph memory."
    )
    assert old.memory_gib == {
        "model_loading_gib": 5.2009,
        "available_kv_cache_gib": 14.31,
        "weights_gib": 5.2,
        "activation_gib": 1.42,
        "non_torch_gib": 0.07,
        "cuda_graphs_gib": 0.41,
    }
    new = parse_log(
        "Actual usage is 36.05 GiB for consumed memory (weights + non-torch), 1.1 GiB for peak activation, and 0.5 GiB for "
        "CUDAGraph memory."
    )
    assert new.memory_gib == {"consumed_gib": 36.05, "activation_gib": 1.1, "cuda_graphs_gib": 0.5}


def test_stock_lines_name_backend_and_kernel() -> None:
    """platforms/cuda.py and model_executor/layers/quantization/auto_awq.py, 0.32."""
    log = parse_log(
        "INFO [auto_awq.py:451] Using MarlinLinearKernel for AutoAWQMarlinLinearMethod\n"
        "INFO [cuda.py:507] Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'TRITON_ATTN'].\n"
        "INFO [cuda.py:548] Using backend FLASH_ATTN for vit attention\n"
        "INFO [utils.py:347] Using LBHNC KV cache layout.\n"
    )
    assert log.attention_backend == "FLASHINFER"
    assert log.weights_kernel == "MarlinLinearKernel"


PROBE = (
    '(Worker pid=5) INFO 11-29 [engine_probe.py:33] quantgate-provenance: {"attention": {"ATTENTION": 30}, '
    '"attention_backend": {"CPU_ATTN": 30}, "kv_cache_dtype": {"KV": 30}, "kv_scale_max": MAX, "kv_scale_min": MIN, "linear": '
    '{"vllm.model_executor.layers.linear.UnquantizedLinearMethod": 1, "LINEAR": 120}}'
)


def probe(**values: str) -> str:
    text = PROBE
    defaults = {
        "ATTENTION": "vllm.CPUAttentionBackendImpl",
        "KV": "fp8",
        "MAX": "1.0",
        "MIN": "1.0",
        "LINEAR": "vllm.AKernel",
    }
    for name, value in (defaults | values).items():
        text = (
            text.replace(name, value, 1)
            if name != "ATTENTION"
            else text.replace('"ATTENTION"', f'"{value}"', 1)
        )
    return text


def test_probe_tells_checkpoint_scales() -> None:
    assert parse_log(probe(MIN="0.02", MAX="0.31")).kv_scales == "checkpoint"
    assert parse_log(probe()).kv_scales == "1.0"
    assert parse_log(probe(KV="bfloat16")).kv_scales is None
    assert parse_log(probe(KV="fp8_per_token_head")).kv_scales is None  # its 1.0 is a placeholder


@pytest.mark.parametrize(
    ("values", "emulated"),
    [
        ({}, ()),
        ({"LINEAR": "pipeline.serving.cpu_plugin.int4_linear.Int4Kernel"}, ("int4_awq_linear",)),
        ({"ATTENTION": "pipeline.serving.cpu_plugin.fp8_attention.Impl"}, ("fp8_kv_attention",)),
        # the plugin's backend hands a BF16 cache to the stock kernel
        ({"ATTENTION": "pipeline.serving.cpu_plugin.fp8_attention.Impl", "KV": "bfloat16"}, ()),
    ],
)
def test_emulated_is_what_ran_not_what_was_registered(
    values: dict[str, str], emulated: tuple[str, ...]
) -> None:
    plugin = "quantgate-cpu-plugin: active int4_awq_linear=emulated fp8_kv_attention=emulated version=1\n"
    log = parse_log(plugin + probe(**values))
    assert log.emulated == emulated
    assert log.plugin is not None
    assert log.plugin.startswith("active")


def test_without_the_probe_everything_registered_counts_as_emulated() -> None:
    log = parse_log("quantgate-cpu-plugin: active int4_awq_linear=emulated fp8_kv_attention=stock version=1")
    assert log.emulated == ("int4_awq_linear",)
    assert parse_log("quantgate-cpu-plugin: inactive (stock kernels)").emulated == ()


def test_layers_left_at_16_bits_are_counted() -> None:
    kinds = '"kv_cache_dtype": {"fp8": 30}'
    log = parse_log(probe().replace(kinds, '"kv_cache_dtype": {"fp8": 28, "bfloat16": 2}'))
    assert (log.kv_cache_dtype, log.kv_skipped_layers) == ("fp8", 2)
    assert parse_log(probe()).kv_skipped_layers == 0
    log = parse_log(probe().replace(kinds, '"kv_cache_dtype": {"fp8": 28, "nvfp4": 2}'))
    assert (log.kv_cache_dtype, log.kv_skipped_layers) == ("fp8+nvfp4", 0)  # joined, not chosen


@pytest.mark.parametrize(
    "text",
    ["", "garbage\x00\n\n", "quantgate-provenance: failed: AttributeError: x", "KV cache size: tokens"],
)
def test_silent_or_broken_log_gives_none(text: str) -> None:
    log = parse_log(text)
    assert log == LogSignals(None, None, None, None, None, None, None, None, None, (), {})


# --- metrics ------------------------------------------------------------------------------------------------------


def test_recorded_metrics_under_load() -> None:
    metrics = parse_metrics(recorded("metrics-0.32-under-load.txt"))
    assert (metrics.running, metrics.waiting) == (6, 6)
    assert metrics.kv_usage == pytest.approx(
        24 / 27
    )  # 6 sequences of 4 blocks; one of 28 blocks is the null block
    assert (metrics.preemptions_total, metrics.prefix_queries, metrics.prefix_hits) == (0, 0, 0)
    assert (metrics.prompt_tokens_total, metrics.generation_tokens_total) == (3991, 283)
    assert (metrics.kv_cache_size_tokens, metrics.kv_cache_max_concurrency) == (3584, 7.0)
    assert (metrics.num_gpu_blocks, metrics.block_size, metrics.cache_dtype) == (28, 128, "auto")


def test_agrees_with_the_prometheus_client() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = recorded("metrics-0.32-under-load.txt")
    samples = {
        sample.name: sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if "reason" not in sample.labels
    }
    ours = parse_metrics(text)
    assert ours.running == samples["vllm:num_requests_running"]
    assert ours.kv_usage == samples["vllm:kv_cache_usage_perc"]
    assert ours.generation_tokens_total == samples["vllm:generation_tokens_total"]
    assert ours.prompt_tokens_total == samples["vllm:prompt_tokens_total"]


def test_missing_metrics_are_none_not_zero() -> None:
    metrics = parse_metrics('# TYPE x gauge\nvllm:num_requests_running{engine="0"} 3.0\n')
    assert metrics.running == 3
    assert metrics.waiting is None
    assert metrics.kv_usage is None
    assert metrics.kv_cache_size_tokens is None


def test_engines_are_summed() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    assert parse_metrics(text).running == 7


# --- both ---------------------------------------------------------------------------------------------------------


def page(tokens: int, **labels: object) -> str:
    zeros = dict.fromkeys(
        (
            "running",
            "waiting",
            "kv_usage",
            "prefix_queries",
            "prefix_hits",
            "preemptions",
            "prompt_tokens",
            "generation_tokens",
        ),
        0.0,
    )
    cache = {"block_size": 128, "num_gpu_blocks": tokens // 128, **labels}
    return metrics_page("demo", zeros, cache)


LOG = parse_log("\n".join(startup_log("demo", 3584, 512, "auto", 1)))


def test_agreeing_signals_give_the_capacity() -> None:
    metrics = parse_metrics(page(3584, kv_cache_size_tokens=3584, kv_cache_max_concurrency=7.0))
    assert reported_capacity(LOG, metrics) == (3584, 7.0)


def test_older_metrics_are_checked_by_blocks() -> None:
    assert reported_capacity(LOG, parse_metrics(page(3584))) == (3584, 7.0)
    with pytest.raises(EngineFailedError, match="3584 KV cache tokens in its log, 3456 in its metrics"):
        reported_capacity(LOG, parse_metrics(page(3456)))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            {"kv_cache_size_tokens": 7168, "kv_cache_max_concurrency": 14.0},
            "3584 .* in its log, 7168 in its metrics",
        ),
        ({"kv_cache_size_tokens": 3584, "kv_cache_max_concurrency": 7.5}, "7.0 sequences in its log, 7.5"),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks": "None"}, "metrics hold no KV cache size"),
    ],
)
def test_disagreement_is_an_error(labels: dict[str, object], message: str) -> None:
    with pytest.raises(EngineFailedError, match=message):
        reported_capacity(LOG, parse_metrics(page(3584, **labels)))


def test_silent_log_is_an_error() -> None:
    with pytest.raises(EngineFailedError, match="log holds no KV cache size"):
        reported_capacity(parse_log(""), parse_metrics(page(3584)))


def test_rounding_of_the_log_is_no_disagreement() -> None:
    log = parse_log(
        "GPU KV cache size: 23,296 tokens, Maximum concurrency for 4,096 tokens per request: 5.69x"
    )
    metrics = parse_metrics(page(23_296, kv_cache_size_tokens=23_296, kv_cache_max_concurrency=5.6875))
    assert reported_capacity(log, metrics) == (23_296, 5.69)
