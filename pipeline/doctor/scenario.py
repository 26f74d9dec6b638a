"""The profile itself: quantizers that can, kernels that exist here, an eval set in order, a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.capacity import Geometry
from pipeline.compatibility import (
    QUANTIZERS,
    Engine,
    Refusal,
    Request,
    attention_backends,
    attention_refusals,
    quantizer_refusals,
    weight_format,
    weight_kernel,
    weight_refusals,
)
from pipeline.compatibility.attention import PLUGIN_FP8_KV, STOCK_FP8_KV
from pipeline.compatibility.invariance import invariance_refusals
from pipeline.compatibility.weights import PLUGIN_INT4, READ_FROM, STOCK_INT4
from pipeline.doctor.check import Check, ok, unfit, warn, wrong
from pipeline.gpu import lowest_capability
from pipeline.planning import plan_of
from pipeline.planning.scenario import geometry_of, head_sizes
from pipeline.results import Environment, Gpu, KernelChoice
from pipeline.serving.kernel_choice import settled
from pipeline.settings import Settings, VariantSettings


def check_quantizers(settings: Settings) -> Iterator[Check]:
    """What the stage `quantize` would refuse, before a model is fetched."""
    if settings.quantizers and settings.model.config is None:
        yield _unknown("quantizers")
        return
    for scheme, recipe in settings.quantizers.items():
        asked = Request.of(recipe, settings.server.tensor_parallel)
        refusals = quantizer_refusals(geometry_of(settings), asked)
        row = QUANTIZERS.get(recipe.backend)
        name = f"quantizer {scheme}"
        where = f"conf/quantizer/{recipe.name}.yaml"
        if refusals:
            yield wrong(name, f"{where}: {_what(refusals)}", refusals[0].fix)
        else:
            size = "KV scales only"
            if recipe.quantizes_weights:
                groups = (
                    f"groups of {recipe.group_size} fit every layer"
                    if recipe.group_size
                    else "a scale per output"
                )
                size = f"{recipe.method}, {groups}"
            made = (
                f"{row.backend} {row.version} in {row.computes_in[settings.device.kind]}"
                if row
                else recipe.backend
            )
            yield ok(name, f"{made}, {size}")


def check_kernels(settings: Settings, machine: Environment, gpus: list[Gpu]) -> Iterator[Check]:
    """For every variant: which kernels will run it on this device, or why none does."""
    device, server = settings.device, settings.server
    engine = Engine(
        server.engine_version, device.kind, lowest_capability(gpus), machine.cpu_flags, server.tensor_parallel
    )
    if not engine.is_read:
        yield warn(
            "kernels",
            f"the tables are of vLLM {READ_FROM}, the profile's engine is {server.engine_version}",
            f"take what follows as a hint, or serve with {READ_FROM}",
        )
    if settings.model.config is None:
        yield _unknown("kernels")
        return
    geometry = geometry_of(settings)
    chosen = settled(settings, machine)
    if device.kind == "cuda" and not gpus:
        yield warn("kernels", f"not checked: there is no card. {_needed(settings, geometry)}", "see GPU")
        return
    if settings.evalset.batching == "invariant":
        unable = invariance_refusals(engine)
        if unable:
            yield unfit("batch invariance", _what(unable), unable[0].fix)
        else:
            said = "the engine's own mode; its kernels aren't those that get deployed"
            yield ok("batch invariance", said)
    for variant in settings.variants.values():
        name = f"kernels {variant.name}"
        refusals = _refusals(settings, variant, geometry, engine)
        found = _kernels(settings, variant, geometry, engine, chosen)
        if refusals:
            yield unfit(name, _what(refusals), refusals[0].fix)
        else:
            yield ok(name, found)


CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
"""Of the cards since Turing: T4, A100, RTX 3090, RTX 4090, H100, B200, RTX 5090."""


def _needed(settings: Settings, geometry: Geometry) -> str:
    """The lowest compute capability that each variant would run on."""
    lowest: dict[str, list[str]] = {}
    for variant in settings.variants.values():
        for capability in CAPABILITIES:
            engine = Engine(
                settings.server.engine_version,
                "cuda",
                capability,
                tensor_parallel=settings.server.tensor_parallel,
            )
            if not _refusals(settings, variant, geometry, engine):
                lowest.setdefault(f"{capability / 10:.1f}", []).append(variant.name)
                break
        else:
            lowest.setdefault("one that doesn't exist", []).append(variant.name)
    parts = [f"{capability} ({', '.join(names)})" for capability, names in lowest.items()]
    return f"The variants need compute capability {'; '.join(parts)}"


def _refusals(
    settings: Settings, variant: VariantSettings, geometry: Geometry, engine: Engine
) -> list[Refusal]:
    found = []
    recipe = settings.quantizers.get(variant.weights)
    if recipe is not None and recipe.quantizes_weights:
        found += weight_refusals(geometry, engine, weight_format(recipe), recipe.group_size)
    pinned = variant.attention_backend
    for head in head_sizes(geometry):
        found += attention_refusals(variant.kv_cache_dtype, engine, head, pinned)
    return found


def _kernels(
    settings: Settings,
    variant: VariantSettings,
    geometry: Geometry,
    engine: Engine,
    chosen: Mapping[str, KernelChoice | None],
) -> str:
    """`chosen`: whose kernel runs a CPU's parts, None where the first run will compare."""
    parts = []
    recipe = settings.quantizers.get(variant.weights)
    if recipe is not None and recipe.quantizes_weights:
        row = weight_kernel(engine, weight_format(recipe))
        if row is not None and "int4" in chosen and recipe.bits == 4:
            parts.append(f"weights {_two('int4', STOCK_INT4, PLUGIN_INT4, chosen)}")
        elif row is not None:
            parts.append(f"weights {row.kernel}")
    pinned = variant.attention_backend
    for head in head_sizes(geometry):
        backends = attention_backends(variant.kv_cache_dtype, engine, head)
        taken = next((row for row in backends if pinned in (None, row.backend)), None)
        if taken is not None:
            others = [row.backend for row in backends if row is not taken]
            also = f" (or {', '.join(others)})" if others and pinned is None and engine.kind == "cuda" else ""
            backend = f"{taken.backend}{also}"
            if "fp8_kv" in chosen and variant.kv_cache_dtype == "fp8":
                backend = _two("fp8_kv", STOCK_FP8_KV, PLUGIN_FP8_KV, chosen)
            parts.append(f"{variant.kv_cache_dtype} KV {backend}")
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _two(part: str, stock: str, plugin: str, chosen: Mapping[str, KernelChoice | None]) -> str:
    """Which of a part's two kernels runs, and why."""
    choice = chosen[part]
    if choice is None:
        return f"{stock} or {plugin} of the plugin, whichever a comparison at the first run finds faster"
    if choice.taken == "stock":
        return f"{stock}, stock, by {choice.why}"
    return f"{plugin}, emulated, by {choice.why}"


def _what(refusals: list[Refusal]) -> str:
    return "; ".join(f"{refusal.what} [{refusal.source}]" for refusal in refusals)


def check_plan(settings: Settings) -> Check:
    """How many sequences are planned to fit. Too few isn't a failure: finding that out is what a run may be for."""
    if settings.model.config is None:
        return _unknown("plan")
    rows = plan_of(settings)["variants"]
    fits = ", ".join(f"{row['variant']} {row['sequences']}" for row in rows)
    return ok("plan", f"{fits} of {settings.policy.required_sequences} sequences")


def check_time(settings: Settings) -> Check:
    """How long all stages take, from nothing."""
    from pipeline.planning.render_time import headline, stage_rows
    from pipeline.planning.timing import guarded_time

    if settings.model.config is None:
        return _unknown("time")
    time, note = guarded_time(settings)
    if time is None:
        return ok("time", note)
    stages = ", ".join(f"{name.replace('`', '')} {expected}" for name, expected, _ in stage_rows(time)[:-1])
    return ok("time", f"{headline(time)} ({stages}); {note}")


def _unknown(name: str) -> Check:
    return warn(
        name,
        "not checked: the model's conf gives no geometry, and its weights aren't at hand",
        "put its config.json's sizes under config: in conf/model/, or fetch it first",
    )
