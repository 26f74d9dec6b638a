"""`quantgate plan`: the capacity table and the ordered levers of a profile, without a checkpoint, an engine or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.capacity import Geometry, WeightScheme, weight_bytes
from pipeline.capacity.budget import GIB
from pipeline.capacity.plan import Card, Lever, Row, levers, plan_row
from pipeline.errors import UserInputError
from pipeline.settings import Settings

BF16 = WeightScheme(bits=16)


def plan_of(settings: Settings) -> dict[str, Any]:
    """Rows per variant, levers, and the same on the label's memory, as one JSON-ready object."""
    model, device, server = settings.model, settings.device, settings.server
    if model.config is None:
        raise UserInputError(
            f"conf/model/{settings.choices['model']}.yaml: config is missing; `plan` needs the geometry of the model's config.json"
        )
    geometry = Geometry.from_config(model.config, f"conf/model/{settings.choices['model']}.yaml: config")
    sizes = {"bf16": weight_bytes(geometry, BF16)}
    for scheme, recipe in settings.quantizers.items():
        sizes[scheme] = weight_bytes(
            geometry, WeightScheme(recipe.bits, recipe.group_size, recipe.zero_point)
        )
    card = Card(device.memory_bytes, device.memory_utilization, device.overhead_bytes)
    rows = [
        plan_row(
            name, variant.weights, variant.kv_cache_dtype, geometry, sizes[variant.weights], card,
            server.block_size, server.max_model_len,
        )
        for name, variant in settings.variants.items()
        if name != settings.control
    ]  # fmt: skip
    required = settings.policy.required_sequences
    found = levers(geometry, sizes, card, server.block_size, server.max_model_len, required, list(sizes))
    return {
        "profile": settings.profile,
        "model": model.name,
        "device": device.name,
        "device_emulated": device.emulated,
        "memory_gib": device.memory_gib,
        "memory_utilization": device.memory_utilization,
        "overhead_gib": device.overhead_gib,
        "max_model_len": server.max_model_len,
        "block_size": server.block_size,
        "required_sequences": required,
        "variants": [_row(row, required) for row in rows],
        "levers": [_lever(lever, required) for lever in found],
    }


def _row(row: Row, required: int) -> dict[str, Any]:
    return {
        "variant": row.variant,
        "weights": row.weights,
        "kv_cache_dtype": row.kv_cache_dtype,
        "weight_gib": round(row.weight_bytes / GIB, 3),
        "kappa_bytes": row.kappa_bytes,
        "budget_gib": round(row.budget_bytes / GIB, 3),
        "tokens": row.pool.tokens,
        "logged_sequences": round(float(row.pool.logged_sequences), 2),
        "sequences": row.pool.fitting_sequences,
        "reaches_required": row.pool.fitting_sequences >= required,
    }


def _lever(lever: Lever, required: int) -> dict[str, Any]:
    return {
        "change": lever.change,
        "sequences": lever.sequences,
        "alone": lever.alone,
        "risk": lever.risk,
        "reaches_required": lever.sequences >= required,
    }


def render_plan(plan: dict[str, Any]) -> str:
    """The same object as a table that a person reads at a glance."""
    emulated = " (an emulated memory budget, not a card)" if plan["device_emulated"] else ""
    lines = [
        f"{plan['model']} on {plan['device']}{emulated}: {plan['memory_utilization']} x {plan['memory_gib']} GiB, "
        f"overhead {plan['overhead_gib']} GiB, {plan['max_model_len']} tokens per sequence, "
        f"{plan['required_sequences']} sequences wanted",
        "",
    ]
    header = ["variant", "weights GiB", "KV B/token", "budget GiB", "KV tokens", "sequences", "enough"]
    body = [
        [
            row["variant"], f"{row['weight_gib']:.2f}", f"{row['kappa_bytes']:,}", f"{row['budget_gib']:.2f}",
            f"{row['tokens']:,}", str(row["sequences"]), "yes" if row["reaches_required"] else "no",
        ]
        for row in plan["variants"]
    ]  # fmt: skip
    lines += _table(header, body)
    lines += ["", "Levers, in order:"]
    body = [
        [
            lever["change"],
            str(lever["sequences"]),
            str(lever["alone"]),
            "yes" if lever["reaches_required"] else "no",
            lever["risk"],
        ]
        for lever in plan["levers"]
    ]
    lines += _table(["change", "sequences", "alone", "enough", "risk"], body)
    return "\n".join(lines)


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    numeric = [all(row[column][:1].isdigit() for row in body) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [header, *body]
    ]
