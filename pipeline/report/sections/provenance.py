"""Where the numbers came from: kernels, scales, versions, machine and settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.report.bundle import ResultBundle
from pipeline.report.cards import cards_table
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, name, words
from pipeline.report.wording import NOT_MEASURED, mebibytes, seconds
from pipeline.results import KernelChoice, Provenance


def section(bundle: ResultBundle) -> Section:
    """Engine by variant, machine, packages, settings."""
    return Section(
        "provenance",
        "Provenance",
        ["What actually ran, read from the engine's own log and the machine, not from what was asked for."],
        [
            engine_table(bundle),
            *filter(None, [cards_table(bundle)]),
            machine_table(bundle),
            packages_table(bundle),
            settings_table(bundle),
        ],
    )


def engine_table(bundle: ResultBundle) -> Table:
    """Facts down, variants across."""
    found = {variant: bundle.verdict.variants[variant].provenance for variant in bundle.variants}
    facts: dict[str, Callable[[Provenance], Cell]] = {
        "Engine": lambda origin: words(origin.engine, note=origin.engine_version or NOT_MEASURED),
        "Attention backend": lambda origin: words(origin.attention_backend),
        "Weights kernel": lambda origin: words(
            origin.weights_kernel or ("" if _quantized(bundle, origin) else "none: weights are not quantized")
        ),
        "KV cache taken": lambda origin: words(origin.kv_cache_dtype),
        "KV scales": _scales,
        "KV rounding": _rounding,
        "Kernel chosen": _kernels,
        "Emulated parts": lambda origin: Cell(", ".join(origin.emulated) or "none"),
        "Sampler": _sampler,
        "Compiled at the start by": lambda origin: (
            words(origin.compiled_with) if origin.gpu else Cell(origin.compiled_with or "")
        ),
        "GPU": lambda origin: Cell(origin.gpu or "none"),
        "CPU extensions seen": lambda origin: words(" ".join(origin.cpu_flags)),
        "Log": lambda origin: words(origin.log_file, kind="code"),
        "Variables": lambda origin: Cell(
            shlex.join(f"{k}={v}" for k, v in sorted(origin.variables.items())) or "none"
        ),
        "Command": lambda origin: words(shlex.join(origin.command), kind="code"),
    }
    rows = [
        [name(label), *[cell(origin) if origin else words(None) for origin in found.values()]]
        for label, cell in facts.items()
    ]
    rows.append([name("Engine start"), *[_wall(bundle, variant, "startup_s") for variant in found]])
    rows.append([name("Measure, in all"), *[_wall(bundle, variant, "wall_s") for variant in found]])
    return Table("Engine by variant", [Column("Fact"), *[Column(variant) for variant in found]], rows)


def _quantized(bundle: ResultBundle, origin: Provenance) -> bool:
    """Whether the plan says that the variant of this provenance has quantized weights."""
    weights = {row.variant: row.weights for row in bundle.plan.rows}
    return any(
        result.provenance is origin and weights.get(variant, "bf16") != "bf16"
        for variant, result in bundle.verdict.variants.items()
    )


ROUNDINGS = {
    "nearest": "to the nearest FP8 number",
    "toward-zero": "toward zero: this CPU kernel cuts off, and loses up to a whole step where others lose half of one",
}


KERNEL_PARTS = {"int4": "int4 product", "fp8_kv": "FP8 KV attention"}
KERNEL_REASONS = {
    "setting": "the device's settings name it",
    "need": "this processor has no other",
    "unmeasured": "the settings have no shapes to compare on",
}


def _kernels(origin: Provenance) -> Cell:
    """Whose kernel ran each part that has two, and why; nothing on a card."""
    said = [
        f"{KERNEL_PARTS[part]}: {choice.taken}, {KERNEL_REASONS.get(choice.why) or _figures(choice)}"
        for part, choice in origin.kernels.items()
    ]
    return Cell("; ".join(said))


def _figures(choice: KernelChoice) -> str:
    steps = ", ".join(
        f"{step.plugin_us:,.0f} against {step.stock_us:,.0f} at {step.tokens}" for step in choice.compared
    )
    return f"by comparison (plugin against stock, µs a layer at so many tokens: {steps})"


def _rounding(origin: Provenance) -> Cell:
    """Only a CPU's kernels are known; elsewhere there is nothing to say."""
    return Cell("" if origin.kv_rounding is None else ROUNDINGS.get(origin.kv_rounding, origin.kv_rounding))


SAMPLERS = {
    "vllm": "vLLM's own for top-k and top-p; nothing measured here samples",
    "flashinfer": "FlashInfer's for top-k and top-p; nothing measured here samples",
}


def _sampler(origin: Provenance) -> Cell:
    """A card's only: a CPU has one, and its log doesn't speak of it."""
    if origin.gpu is None:
        return Cell("")
    return words(SAMPLERS.get(origin.sampler, origin.sampler) if origin.sampler else None)


def _scales(origin: Provenance) -> Cell:
    if origin.kv_scales is not None:
        return Cell(origin.kv_scales)
    quantized = (origin.kv_cache_dtype or "").startswith("fp8")
    return (
        words(None) if quantized or origin.kv_cache_dtype is None else Cell("none: KV cache is not quantized")
    )


def _wall(bundle: ResultBundle, variant: str, key: str) -> Cell:
    measured = bundle.measurements.get(variant)
    return words(seconds(getattr(measured, key)) if measured else None)


def machine_table(bundle: ResultBundle) -> Table:
    """The machine that ran it."""
    found = bundle.environment
    gpus = "; ".join(
        f"{gpu.name} ({mebibytes(gpu.memory_total_bytes)}, {mebibytes(gpu.memory_visible_bytes)} visible, compute "
        f"capability {gpu.compute_capability}, driver {gpu.driver})"
        for gpu in found.gpus
    )
    facts = {
        "Processor": f"{found.cpu_model}, {found.cpu_count} CPUs",
        "Vector extensions": " ".join(found.cpu_flags),
        "Memory": mebibytes(found.memory_bytes),
        "GPU": gpus or "none",
        "Platform": found.platform,
        "Python": found.python,
        "Device of the profile": bundle.plan.device
        + (" (emulated memory budget)" if bundle.plan.device_emulated else ""),
        "Model": bundle.plan.model,
    }
    return Table(
        "Machine",
        [Column("Fact"), Column("Value")],
        [[name(key), words(value)] for key, value in facts.items()],
    )


def packages_table(bundle: ResultBundle) -> Table:
    """Versions by environment, with the lock they were installed from."""
    found = bundle.environment
    rows = []
    for environment in sorted({*found.packages, *found.locks}):
        versions = found.packages.get(environment, {})
        text = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
        rows.append(
            [name(environment), words(text), words((found.locks.get(environment) or "")[:16], kind="code")]
        )
    return Table(
        "Packages",
        [
            Column("Environment"),
            Column("Versions"),
            Column("Lock (SHA-256)", "first 16 digits of the lock file's hash"),
        ],
        rows,
    )


def settings_table(bundle: ResultBundle) -> Table:
    """Every setting that was handed over, flattened to dotted keys."""
    groups = {group: values for group, values in bundle.facts.items() if group != "variants"}
    rows = [[name(key), Cell(value)] for key, value in flatten(groups).items()]
    return Table("Settings", [Column("Setting"), Column("Value")], rows)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}` as `{"a.b": "1"}`, in the given order."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) or "none"
        else:
            flat[f"{prefix}{key}"] = "none" if value is None else str(value)
    return flat
