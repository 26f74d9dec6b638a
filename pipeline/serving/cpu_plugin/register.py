"""The entry point: vLLM calls `register` in every process (API server, engine core, workers), possibly more than once.

It always installs the engine probe, whose log line says what the loaded model really runs on, then emulates the missing parts
and says so in one line that begins with `MARK`: provenance is read from it.
"""

from __future__ import annotations

import logging
import os

import pipeline
from pipeline.serving import engine_probe
from pipeline.serving.cpu_plugin import detect, forking

MARK = "quantgate-cpu-plugin:"
# The stock kernel accepts every layer and fails at the first product, so it has to step aside for ours to be asked.
BROKEN_STOCK_KERNEL = "CPUWNA16LinearKernel"
logger = logging.getLogger("vllm.quantgate")  # a child of vLLM's logger: its handlers and prefixes
_process = 0


def register() -> None:
    """Emulate what is missing here; log one line. Idempotent. Raises `UserInputError` for a bad QUANTGATE_CPU_PLUGIN."""
    global _process
    if _process == os.getpid():
        return
    needs = detect.needs()
    if _process != 0:  # forked: everything is in place
        forking.leave_port()
    else:
        engine_probe.install()
        forking.install()
        if needs.int4_awq_linear:
            register_int4_linear()
        if needs.fp8_kv_attention:
            register_fp8_attention()
    _process = os.getpid()
    if not logger.isEnabledFor(logging.INFO):
        return  # the API server, which has no log yet and must compute nothing before it forks
    rounding = None if needs.fp8_kv_attention else detect.stock_fp8_rounding()
    logger.info("%s %s", MARK, describe(needs, rounding))


def describe(needs: detect.Needs, stock_fp8_rounding: str | None = None) -> str:
    """The log line behind the mark.

    `active int4_awq_linear=emulated fp8_kv_attention=stock version=0.1.0` or `inactive (stock kernels)`, followed by
    ` fp8_kv_rounding=toward-zero` where the stock kernel's rounding was found out.
    """
    said = "inactive (stock kernels)"
    if needs.any:
        parts = {"int4_awq_linear": needs.int4_awq_linear, "fp8_kv_attention": needs.fp8_kv_attention}
        states = [f"{name}={'emulated' if emulated else 'stock'}" for name, emulated in parts.items()]
        said = " ".join(["active", *states, f"version={pipeline.__version__}"])
    return said if stock_fp8_rounding is None else f"{said} fp8_kv_rounding={stock_fp8_rounding}"


def register_int4_linear() -> None:
    """Put our kernel into the registry, and the stock one on vLLM's own list of kernels not to use."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms import PlatformEnum

    from pipeline.serving.cpu_plugin.int4_linear import Int4PackLinearKernel

    register_linear_kernel(Int4PackLinearKernel, PlatformEnum.CPU, "mp")
    disabled = [name for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
    if BROKEN_STOCK_KERNEL not in disabled:
        os.environ["VLLM_DISABLED_KERNELS"] = ",".join([*disabled, BROKEN_STOCK_KERNEL])


def register_fp8_attention() -> None:
    """Override the backend CPU_ATTN. By name, so that processes without attention don't import it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN,
        "pipeline.serving.cpu_plugin.fp8_attention.Fp8CPUAttentionBackend",
    )
