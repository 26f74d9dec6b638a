"""Everything that `quantgate plan` answers, as one JSON-ready object, without a checkpoint, an engine, a GPU or a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pipeline.capacity import GIB, Geometry, Row
from pipeline.capacity.levers import Answer, Planner, Setup
from pipeline.planning.scenario import (
    by_hand_of,
    card_of,
    card_on,
    geometry_of,
    row_of,
    rules_of,
    weights_by_cards,
)
from pipeline.results import HandRow
from pipeline.settings import Settings

if TYPE_CHECKING:
    from pipeline.capacity.workload import Lengths

LONG_CONTEXT_TOKENS = 131_072
RAISED_UTILIZATION = 0.95
"""What the utilization lever goes to; 0.99 is answered on its own."""
TOO_HIGH = 0.99


def plan_of(
    settings: Settings, lengths: Lengths | None = None, counted: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Rows per variant with bands and the hand calculation beside them, the levers, and the questions people ask next.

    `lengths`: a workload whose expected concurrency is to be answered as well. `counted`: weights scheme -> bytes of a
    checkpoint at hand; the others are computed.
    """
    counted = counted or {}
    device, server = settings.device, settings.server
    geometry, card, rules = geometry_of(settings), card_of(settings), rules_of(settings)
    required = settings.policy.required_sequences
    planner = Planner(
        geometry,
        weights_by_cards(settings, geometry, counted),
        lambda dtype, cards: card_on(settings, dtype, cards),
        rules,
    )
    rows = plan_rows(settings, counted)
    variants = []
    for row in rows:
        found = _row(row, required)
        own = card_of(settings, settings.variants[row.variant])
        found["by_hand"] = _by_hand(by_hand_of(settings, row, own))
        found["overhead_gib"] = round(own.overhead_bytes / GIB, 3)
        found["longest_for_required"] = planner.longest(_setup(settings, row), required)
        found["weights_counted"] = row.weights in counted
        found["workload"] = None if lengths is None else _workload(row, lengths)
        variants.append(found)
    quantized = next(iter(settings.quantizers), None)
    start = Setup("bf16", "bfloat16", server.max_model_len, device.memory_utilization, server.tensor_parallel)
    return {
        "profile": settings.profile,
        "model": settings.model.name,
        "device": device.name,
        "device_emulated": device.emulated,
        "engine_version": server.engine_version,
        "memory_gib": device.memory_gib,
        "held_gib": device.held_gib,
        "memory_utilization": device.memory_utilization,
        "startable": card.startable,
        "highest_utilization": card.highest_utilization,
        "overheads": [
            {
                "name": term.name, "gib": round(term.value_bytes / GIB, 3), "low_gib": round(term.low_bytes / GIB, 3),
                "high_gib": round(term.high_bytes / GIB, 3), "driver": term.driver, "calibrated": term.calibrated,
            }
            for term in card.overheads
        ],
        "overhead_gib": round(card.overhead_bytes / GIB, 3),
        "max_model_len": server.max_model_len,
        "block_size": server.block_size,
        "tensor_parallel": server.tensor_parallel,
        "pipeline_parallel": server.pipeline_parallel,
        "required_sequences": required,
        "workload": None if lengths is None else _lengths(lengths),
        "variants": variants,
        "levers": _levers(planner.answer(start, required, quantized, "fp8", RAISED_UTILIZATION)),
        "long_context": _long_context(geometry, rows),
        "utilization_0_99": _too_high(settings, planner, rows),
    }  # fmt: skip


def plan_rows(settings: Settings, counted: Mapping[str, int] | None = None) -> list[Row]:
    """The row of every variant; the A/A control's would be the reference's again."""
    geometry = geometry_of(settings)
    return [
        row_of(settings, variant, geometry, card_of(settings, variant), (counted or {}).get(variant.weights))
        for name, variant in settings.variants.items()
        if name != settings.control
    ]


def _setup(settings: Settings, row: Row) -> Setup:
    server = settings.server
    return Setup(
        row.weights,
        row.kv_cache_dtype,
        server.max_model_len,
        settings.device.memory_utilization,
        server.tensor_parallel,
    )


def _row(row: Row, required: int) -> dict[str, Any]:
    return {
        "variant": row.variant,
        "weights": row.weights,
        "kv_cache_dtype": row.kv_cache_dtype,
        "weight_gib": round(row.weight_bytes / GIB, 3),
        "kappa_bytes": row.kappa_bytes,
        "budget_gib": round(row.budget.bytes / GIB, 3),
        "block_size": row.pool.block_size,
        "blocks": row.pool.blocks,
        "tokens": row.pool.tokens,
        "logged_sequences": round(row.pool.logged_sequences, 2),
        "sequences": row.pool.fitting_sequences,
        "sequences_low": row.pool_low.fitting_sequences,
        "sequences_high": row.pool_high.fitting_sequences,
        "waste_tokens": row.pool.waste_tokens,
        "reaches_required": row.pool.fitting_sequences >= required,
        "reaches_required_at_low": row.pool_low.fitting_sequences >= required,
    }


def _by_hand(found: HandRow | None) -> dict[str, Any] | None:
    if found is None:
        return None
    budget_gib = round(found.budget_bytes / GIB, 2)
    return {"budget_gib": budget_gib, "sequences": found.sequences, "steps": found.steps}


def _workload(row: Row, lengths: Lengths) -> dict[str, Any]:
    # It brings numpy, which a plan without a workload needn't load.
    from pipeline.capacity.workload import workload_capacity

    return asdict(workload_capacity(row, lengths))


def _lengths(lengths: Lengths) -> dict[str, Any]:
    return {
        "source": lengths.source,
        "mean_tokens": round(lengths.mean, 1),
        "p95_tokens": round(lengths.p95, 1),
    }


def _levers(answer: Answer) -> dict[str, Any]:
    return {
        "start_sequences": answer.start,
        "required_sequences": answer.required,
        "steps": [
            {
                "change": lever.change, "sequences": lever.sequences, "alone": lever.alone, "risk": lever.risk,
                "reaches_required": lever.sequences >= answer.required,
            }
            for lever in answer.levers
        ],
        "smallest_set": None if answer.smallest is None else list(answer.smallest),
        "closest_sequences": answer.closest,
    }  # fmt: skip


def _long_context(geometry: Geometry, rows: list[Row]) -> dict[str, Any]:
    """128k tokens per sequence: what one takes, and how many fit."""
    found = []
    for row in rows:
        pool = row.at(LONG_CONTEXT_TOKENS)
        size = pool.blocks_per_sequence * max(row.layout.block_bytes)
        found.append(
            {
                "variant": row.variant,
                "gib_per_sequence": round(size / GIB, 2),
                "sequences": pool.fitting_sequences,
                "missing_gib": round(max(0, size + max(row.layout.block_bytes) - row.budget.bytes) / GIB, 2),
            }
        )
    return {
        "tokens": LONG_CONTEXT_TOKENS,
        "model_max_tokens": geometry.max_position,
        "above_the_models_own": geometry.max_position < LONG_CONTEXT_TOKENS,
        "variants": found,
    }


def _too_high(settings: Settings, planner: Planner, rows: list[Row]) -> dict[str, Any] | None:
    """Why not 0.99: what it would bring, and what would be left for everything that isn't in the budget."""
    if settings.device.emulated:
        return None
    best = max(rows, key=lambda row: row.pool.fitting_sequences)
    setup = _setup(settings, best)
    raised = Setup(setup.weights, setup.kv_cache_dtype, setup.max_model_len, TOO_HIGH, setup.cards)
    spike = best.budget.bytes - best.budget.low_bytes
    best_card = card_of(settings, settings.variants[best.variant])
    too_high = replace(best_card, utilization=TOO_HIGH)
    return {
        "utilization": TOO_HIGH,
        "variant": best.variant,
        "sequences": planner.sequences(raised),
        "gained_sequences": planner.sequences(raised) - best.pool.fitting_sequences,
        "left_outside_gib": round(too_high.left_outside_bytes / GIB, 2),
        "left_outside_now_gib": round(best_card.left_outside_bytes / GIB, 2),
        "overheads_may_exceed_gib": round(spike / GIB, 2),
    }
