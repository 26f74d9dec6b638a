"""The comparison times what it says: all kernels compute the same product and the same attention."""

import json
import os
import subprocess
import sys

import pytest
import torch
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from pipeline.serving.cpu_plugin import compare, detect
from pipeline.serving.cpu_plugin.fp8_attention import Fp8CPUAttentionBackend
from pipeline.serving.cpu_plugin.int4_linear import Int4PackLinearKernel

needs_stock = pytest.mark.skipif(
    not detect.stock_reads_fp8(), reason="needs AVX-512: there is only one kernel"
)


def off_by(found, meant):
    return float((found.float() - meant.float()).norm() / meant.float().norm())


@needs_stock
@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576)])
def test_both_int4_kernels_multiply_the_same_weights(inputs, outputs, zero_points):
    torch.manual_seed(1)
    x = torch.randn(8, inputs).bfloat16()
    found = []
    for kernel in (CPUWNA16LinearKernel, Int4PackLinearKernel):
        torch.manual_seed(2)
        found.append(compare._int4_product(kernel, inputs, outputs, 64, zero_points)(x))
    assert off_by(found[1], found[0]) < 0.01


@needs_stock
@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_all_attention_kernels_attend_to_the_same_cache(tokens):
    found = {}
    with torch.inference_mode():
        for name, backend, dtype in (
            ("bf16", CPUAttentionBackend, "auto"), ("stock", CPUAttentionBackend, "fp8"), ("plugin", Fp8CPUAttentionBackend, "fp8"),
        ):  # fmt: skip
            torch.manual_seed(3)
            found[name] = compare._attention(backend, dtype, 9, 3, 64, 128, tokens)().clone()
    assert float(found["bf16"].float().norm()) > 0
    assert off_by(found["plugin"], found["bf16"]) < off_by(found["stock"], found["bf16"]) < 0.25


@needs_stock
def test_the_child_answers_in_json(monkeypatch):
    shapes = {
        "int4": {"layers": [[64, 96]], "group_size": 32, "zero_points": True},
        "fp8_kv": {"heads": 2, "kv_heads": 1, "head_size": 32, "block_size": 32},
    }
    done = subprocess.run(
        [sys.executable, "-m", compare.__name__], input=json.dumps(shapes), env=os.environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {part: [int(tokens) for tokens in steps] for part, steps in found.items()} == {
        part: list(compare.TOKENS) for part in shapes
    }
    seconds = [s for steps in found.values() for step in steps.values() for s in step.values()]
    assert len(seconds) == 2 * len(compare.TOKENS) * 3
    assert all(0 < s < 10 for s in seconds)
