"""Times the stock kernels beside the plugin's, and BF16's, on a model's own shapes. Run in the serve environment:

    python -m pipeline.serving.cpu_plugin.compare < request.json > result.json

The request is `Request` as JSON; the result is part -> number of tokens -> {"stock", "plugin", "bf16"} in seconds a layer. Rounds
alternate and the median of the fastest tenth counts, so that what else runs on the machine hits no kernel alone. Nothing is decided here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Times = dict[str, dict[str, dict[str, float]]]
"""part -> tokens -> kernel -> seconds."""

BUDGET_S = 2.5
"""For each part; reading the engine's modules takes longer than that."""
MIDDLE_LAYERS = 6
"""So many copies of a layer take turns, as in a model: one alone would stay in the processor's cache."""
TOKENS = (1, 8, 32, 128, 512)
"""Tokens of a step: a lone stream, a few, many, and two prefills."""
PREFILL_TOKENS = 128
CONTEXT = 192
"""Tokens that each sequence of a decode step has in the cache."""


def main() -> None:
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    found: Times = {}
    if request["int4"] is not None:
        found["int4"] = compare_int4(**request["int4"])
    if request["fp8_kv"] is not None:
        found["fp8_kv"] = compare_fp8_kv(**request["fp8_kv"])
    json.dump(found, out)


def compare_int4(layers: list[list[int]], group_size: int, zero_points: bool) -> dict[str, dict[str, float]]:
    """`layers`: [inputs, outputs] of every product of one layer."""
    import torch
    from vllm import _custom_ops  # noqa: F401  loads the kernel library
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    from pipeline.serving.cpu_plugin.int4_linear import Int4PackLinearKernel

    products: dict[str, list[list[tuple[int, Any]]]] = {
        name: [
            [(shape[0], _int4_product(kernel, *shape, group_size, zero_points)) for shape in layers]
            for _ in range(MIDDLE_LAYERS)
        ]
        for name, kernel in (("stock", CPUWNA16LinearKernel), ("plugin", Int4PackLinearKernel))
    }
    products["bf16"] = [
        [(inputs, _plain_product(inputs, outputs)) for inputs, outputs in layers]
        for _ in range(MIDDLE_LAYERS)
    ]
    found = {}
    for tokens in TOKENS:
        x = {inputs: torch.randn(tokens, inputs).bfloat16() for inputs, _ in layers}

        def run(copies: list[list[tuple[int, Any]]], x: dict[int, Any] = x) -> None:
            for copy in copies:
                for inputs, product in copy:
                    product(x[inputs])

        bodies = {name: lambda copies=copies: run(copies) for name, copies in products.items()}
        found[str(tokens)] = {
            name: s / MIDDLE_LAYERS for name, s in _alternate(bodies, BUDGET_S / len(TOKENS)).items()
        }
    return found


def compare_fp8_kv(heads: int, kv_heads: int, head_size: int, block_size: int) -> dict[str, dict[str, float]]:
    """Writing the step's keys and values and attending, for sequences with `CONTEXT` tokens in the cache."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from pipeline.serving.cpu_plugin.fp8_attention import Fp8CPUAttentionBackend

    shape = (heads, kv_heads, head_size, block_size)
    found = {}
    for tokens in TOKENS:
        bodies = {
            "stock": _attention(CPUAttentionBackend, "fp8", *shape, tokens),
            "plugin": _attention(Fp8CPUAttentionBackend, "fp8", *shape, tokens),
            "bf16": _attention(CPUAttentionBackend, "auto", *shape, tokens),
        }
        with torch.inference_mode():
            found[str(tokens)] = _alternate(bodies, BUDGET_S / len(TOKENS))
    return found


def _alternate(bodies: dict[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Median of the fastest tenth of each body's times, in seconds; at least nine rounds in which all take their turn."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for body in bodies.values():
        body()
        body()
    deadline = time.perf_counter() + budget_s
    while len(next(iter(times.values()))) < 9 or time.perf_counter() < deadline:
        for name, body in bodies.items():
            started = time.perf_counter()
            body()
            times[name].append(time.perf_counter() - started)
    return {
        name: statistics.median(sorted(found)[: max(3, len(found) // 10)]) for name, found in times.items()
    }


def _int4_product(
    kernel: Any, inputs: int, outputs: int, group_size: int, zero_points: bool
) -> Callable[[Any], Any]:
    """x -> y of a layer with random weights, its parameters as AutoAWQMarlinLinearMethod hands them to a kernel."""
    import torch
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    groups = inputs // group_size
    layer = torch.nn.Module()
    layer.bias = None
    layer.weight = _parameter(_words(inputs // 8, outputs), input_dim=0, output_dim=1, packed_dim=0)
    layer.scales = _parameter(torch.rand(groups, outputs).bfloat16() * 0.02, input_dim=0, output_dim=1)
    if zero_points:
        layer.zeros = _parameter(_words(outputs // 8, groups), input_dim=1, output_dim=0, packed_dim=0)
    config = MPLinearLayerConfig(
        full_weight_shape=(inputs, outputs),
        partition_weight_shape=(inputs, outputs),
        weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=group_size,
        zero_points=zero_points,
    )
    found = kernel(config, "weight", "scales", "zeros" if zero_points else None)
    found.process_weights_after_loading(layer)
    return lambda x: found.apply_weights(layer, x)


def _plain_product(inputs: int, outputs: int) -> Callable[[Any], Any]:
    import torch

    weight = torch.randn(outputs, inputs).bfloat16()
    return lambda x: torch.nn.functional.linear(x, weight)


def _words(rows: int, columns: int) -> Any:
    import torch

    return torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int64).to(torch.int32)


def _parameter(data: Any, **places: int) -> Any:
    import torch

    parameter = torch.nn.Parameter(data, requires_grad=False)
    for name, place in places.items():
        setattr(parameter, name, place)
    return parameter


def _attention(
    backend: Any, cache_dtype: str, heads: int, kv_heads: int, head_size: int, block_size: int, tokens: int
) -> Callable[[], Any]:
    """One step of `tokens` tokens: each of a sequence of its own, or one sequence's prompt where they are many."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    prefill = tokens >= PREFILL_TOKENS
    sequences, new = (1, tokens) if prefill else (tokens, 1)
    length = tokens if prefill else CONTEXT
    width = -(-length // block_size)
    dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda _: heads),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    with set_current_vllm_config(config):
        builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
        impl = backend.get_impl_cls()(heads, head_size, head_size**-0.5, kv_heads, None, None, cache_dtype)
    layer: Any = SimpleNamespace(isa=builder.isa, _k_scale_float=1.0, _v_scale_float=1.0)
    cache = torch.zeros(sequences * width, kv_heads, block_size, 2 * head_size, dtype=dtype)
    table = torch.arange(sequences * width, dtype=torch.int32).view(sequences, width)
    slots = torch.arange(sequences)[:, None] * width * block_size + torch.arange(length - new, length)
    common: Any = SimpleNamespace(
        num_reqs=sequences,
        num_actual_tokens=tokens,
        max_query_len=new,
        max_seq_len=length,
        query_start_loc=torch.arange(sequences + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((sequences,), length, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=slots.flatten(),
        causal=True,
    )
    query = torch.randn(tokens, heads, head_size).bfloat16()
    key, value = torch.randn(2, tokens, kv_heads, head_size).bfloat16()
    output = torch.zeros_like(query)

    metadata = builder.build(0, common)

    def step() -> Any:
        impl.do_kv_cache_update(layer, key, value, cache, slots.flatten())
        return impl.forward(layer, query, key, value, cache, metadata, output)

    return step


if __name__ == "__main__":
    main()
