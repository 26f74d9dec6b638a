"""The probe that runs in the engine, on stand-ins for its modules, and its way through the log into our signals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from pipeline.serving.engine_probe import MARK, describe
from pipeline.serving.signals import parse_log


class CPUAttentionBackendImpl:
    """Named as the engine's."""


class UnquantizedLinearMethod:
    """Named as the engine's."""


class UnquantizedEmbeddingMethod:
    """Named as the engine's."""


class CPUWNA16LinearKernel:
    """Named as the engine's."""


class Scheme:
    """A compressed-tensors scheme without a kernel of its own."""


def attention(kv_dtype: str = "auto", scale: float = 1.0, on_the_host: float | None = None) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    return SimpleNamespace(
        layer_name=f"model.layers.{scale}.self_attn.attn",
        attn_backend=backend,
        impl=CPUAttentionBackendImpl(),
        kv_cache_dtype=kv_dtype,
        kv_cache_torch_dtype="torch.bfloat16",
        _k_scale=scale,
        _v_scale=scale / 2,
        _k_scale_float=scale if on_the_host is None else on_the_host,
        _v_scale_float=scale / 2,
        quant_method=None,
    )


def linear(method: Any, **more: Any) -> Any:
    return SimpleNamespace(quant_method=method, input_size_per_partition=576, **more)


def through_the_log(*modules: Any) -> Any:
    model = SimpleNamespace(modules=lambda: iter([SimpleNamespace(), *modules]))
    return parse_log(f"(Worker pid=1) INFO 11-29 [engine_probe.py:33] {MARK} {json.dumps(describe(model))}")


def test_plain_model() -> None:
    log = through_the_log(attention(), attention(), linear(UnquantizedLinearMethod()))
    assert log.attention_backend == "CPU_ATTN"
    assert log.kv_cache_dtype == "bfloat16", "'auto' is resolved to what the cache really holds"
    assert log.kv_scales is None
    assert log.weights_kernel is None


def test_awq_names_the_kernel_not_the_method() -> None:
    method = SimpleNamespace(kernel=CPUWNA16LinearKernel())
    log = through_the_log(attention("fp8"), linear(method), linear(UnquantizedEmbeddingMethod()))
    assert log.weights_kernel == "CPUWNA16LinearKernel"


def test_compressed_tensors_keeps_its_kernel_in_the_scheme() -> None:
    with_kernel = linear(object(), scheme=SimpleNamespace(kernel=CPUWNA16LinearKernel()))
    assert through_the_log(with_kernel).weights_kernel == "CPUWNA16LinearKernel"
    assert through_the_log(linear(object(), scheme=Scheme())).weights_kernel == "Scheme"


def test_one_layer_with_a_scale_of_its_own_is_enough_for_checkpoint_scales() -> None:
    assert through_the_log(attention("fp8", 2.0), attention("fp8", 1.0)).kv_scales == "checkpoint"


def test_scales_come_layer_by_layer_and_two_copies_that_differ_are_named() -> None:
    log = through_the_log(attention("fp8", 0.5), attention("fp8", 0.25, on_the_host=1.0))
    assert log.kv_scales_by_layer == {
        "model.layers.0.5.self_attn.attn": (0.5, 0.25),
        "model.layers.0.25.self_attn.attn": (0.25, 0.125),
    }
    assert log.kv_scales_apart == ("model.layers.0.25.self_attn.attn",)


def test_model_without_attention_or_linear_layers() -> None:
    log = through_the_log()
    assert (log.attention_backend, log.kv_cache_dtype, log.kv_scales, log.weights_kernel) == (
        None,
        None,
        None,
        None,
    )
