"""The card as an engine meets it: its memory, and its overheads by what drives them, for a variant of a profile."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from pipeline.capacity import GIB, Card, Geometry, Term
from pipeline.capacity.levers import Setup
from pipeline.capacity.overheads import (
    Constant,
    Constants,
    Drivers,
    context_term,
    overhead_terms,
    workspace_bytes,
)
from pipeline.capacity.weights import WeightScheme
from pipeline.compatibility import Engine, attention_backends
from pipeline.planning.scenario import geometry_of, head_sizes, rules_of, scheme_of
from pipeline.settings import Settings, VariantSettings
from pipeline.settings.overheads import OverheadTerm

V2_FROM = (0, 32)
"""The first version whose source was read with V2 as what it takes for every model (config/vllm.py, use_v2_model_runner)."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
INVARIANT = "VLLM_BATCH_INVARIANT"
NARROW = ("fp8", "w8a8")
"""Weight schemes whose layers take their inputs in 8 bits."""


def card_of(settings: Settings, variant: VariantSettings, geometry: Geometry | None = None) -> Card:
    """The device with the overheads of `variant` under the profile's engine. `geometry`: of the checkpoint at hand, else conf's."""
    drivers = drivers_of(settings, variant, geometry)
    return _card(settings, drivers, geometry or geometry_of(settings))


def card_for(
    settings: Settings, geometry: Geometry, setup: Setup, scheme: WeightScheme | None = None
) -> Card:
    """The same for a point of a search. `scheme`: of weights that the profile doesn't name."""
    if settings.overheads.model is None:
        return _card(settings, None, geometry)
    scheme = scheme or scheme_of(settings, setup.weights)
    drivers = _drivers(settings, geometry, setup.kv_cache_dtype, None, scheme, setup.cards)
    return _card(settings, drivers, geometry)


def empty_card(settings: Settings) -> Card:
    """The device with the engine's context but no overhead: what decides whether an engine starts at all."""
    any_variant = next(iter(settings.variants.values()))
    return replace(card_of(settings, any_variant), overheads=(), workspace_bytes=0)


def drivers_of(
    settings: Settings, variant: VariantSettings, geometry: Geometry | None = None
) -> Drivers | None:
    """What moves the overheads of a variant; None where they are a table."""
    if settings.overheads.model is None:
        return None
    return _drivers(
        settings,
        geometry or geometry_of(settings),
        variant.kv_cache_dtype,
        variant.attention_backend,
        scheme_of(settings, variant.weights),
        settings.server.tensor_parallel,
    )


def backend_of(settings: Settings, geometry: Geometry, kv_dtype: str, pinned: str | None = None) -> str:
    """The attention backend that the engine takes on the profile's card."""
    if pinned is not None:
        return pinned
    engine = Engine(settings.server.engine_version, settings.device.kind, _capability(settings))
    found = [attention_backends(kv_dtype, engine, head) for head in head_sizes(geometry)]
    # A cache that nothing keeps is refused elsewhere; where heads differ the widest one's backend counts.
    return found[-1][0].backend if found and found[-1] else "TRITON_ATTN"


def _drivers(
    settings: Settings,
    geometry: Geometry,
    kv_dtype: str,
    pinned: str | None,
    scheme: WeightScheme,
    cards: int,
) -> Drivers:
    server = settings.server
    major, minor = map(int, server.engine_version.split(".")[:2])
    asked = server.environment.get(RUNNER)
    return Drivers(
        version=(major, minor),
        max_num_batched_tokens=rules_of(settings).max_num_batched_tokens,
        max_num_seqs=server.max_num_seqs,
        eager=server.enforce_eager,
        v2=(major, minor) >= V2_FROM if asked is None else asked == "1",
        backend=backend_of(settings, geometry, kv_dtype, pinned),
        capability=_capability(settings),
        tensor_parallel=cards,
        narrow_inputs=scheme.method in NARROW,
        batch_invariant=server.environment.get(INVARIANT) == "1",
    )


def _capability(settings: Settings) -> int | None:
    said = settings.device.compute_capability
    return None if said is None else int(said.replace(".", ""))


def _card(settings: Settings, drivers: Drivers | None, geometry: Geometry) -> Card:
    device, version = settings.device, settings.server.engine_version
    table = settings.overheads.for_version(version)
    held = int(device.held_gib * GIB)
    if drivers is None or settings.overheads.model is None:
        terms = tuple(_fixed(row) for row in table)
        return Card(device.memory_bytes, device.memory_utilization, terms, held)
    model = settings.overheads.model
    values = {
        name: Constant(one.value, one.low, one.high, one.source, one.runs)
        for name, one in model.for_version(version).items()
    }
    constants = Constants(values, model.multiprocessors)
    terms = tuple(measured(term, table) for term in overhead_terms(geometry, drivers, constants))
    return Card(
        device.memory_bytes,
        device.memory_utilization,
        terms,
        held,
        context_term(drivers, constants),
        workspace_bytes(geometry, drivers),
    )


def _fixed(row: OverheadTerm) -> Term:
    figures = (int(value * GIB) for value in (row.gib, row.low_gib, row.high_gib))
    return Term(row.name, *figures, source=row.source, runs=row.runs)


def measured(term: Term, table: tuple[OverheadTerm, ...]) -> Term:
    """A term of the model with what was measured in its place.

    With the same driver the figures stand as they are. Elsewhere the model's own are scaled by measured / model, on average over the
    drivers that were measured; its band goes along, and counts as computed, since nobody has measured this driver.
    """
    rows = [row for row in table if row.name == term.name]
    for row in rows:
        if row.driver in (None, term.driver):
            return replace(_fixed(row), driver=term.driver, model_bytes=term.value_bytes)
    ratios = [row.gib / row.model_gib for row in rows if row.model_gib]
    if not ratios:
        return term
    ratio = fmean(ratios)
    return replace(
        term,
        value_bytes=int(ratio * term.value_bytes),
        low_bytes=int(ratio * term.low_bytes),
        high_bytes=int(ratio * term.high_bytes),
        source=f"{rows[0].source}, scaled by {ratio:.2f} from {', '.join(str(row.driver) for row in rows)}",
        model_bytes=term.value_bytes,
    )
