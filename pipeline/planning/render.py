"""The plan as tables that a person reads at a glance, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

CSV_COLUMNS = (
    "variant", "weights", "kv_cache_dtype", "weight_gib", "kappa_bytes", "budget_gib", "block_size", "blocks", "tokens",
    "logged_sequences", "sequences", "sequences_low", "sequences_high", "reaches_required", "longest_for_required",
)  # fmt: skip


def as_csv(plan: dict[str, Any]) -> str:
    """One line per variant, with a header; the hand calculation in the last two columns, empty where there is none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, "by_hand_budget_gib", "by_hand_sequences"])
    for row in plan["variants"]:
        hand = row["by_hand"] or {"budget_gib": "", "sequences": ""}
        writer.writerow([*(row[name] for name in CSV_COLUMNS), hand["budget_gib"], hand["sequences"]])
    return buffer.getvalue()


def render_plan(plan: dict[str, Any]) -> str:
    """Every answer of the plan as text."""
    parts = [_heading(plan), _variants(plan)]
    if any(row["by_hand"] for row in plan["variants"]):
        parts.append(_difference(plan))
    parts += [_levers(plan), _lengths(plan), _long_context(plan)]
    if plan["workload"]:
        parts.append(_workload(plan))
    if plan["utilization_0_99"]:
        parts.append(_too_high(plan))
    parts.append(_overheads(plan))
    return "\n\n".join("\n".join(part) for part in parts if part)


def _heading(plan: dict[str, Any]) -> list[str]:
    emulated = " (an emulated memory budget, not a card)" if plan["device_emulated"] else ""
    ranks = plan["tensor_parallel"] * plan["pipeline_parallel"]
    cards = f"{ranks} x " if ranks > 1 else ""
    lines = [
        f"{plan['model']} on {cards}{plan['device']}{emulated}, vLLM {plan['engine_version']}",
        f"{plan['memory_utilization']} x {plan['memory_gib']} GiB, overhead {plan['overhead_gib']:.2f} GiB, "
        f"{plan['max_model_len']:,} tokens per sequence, {plan['required_sequences']} sequences wanted",
    ]
    if not plan["startable"]:
        lines.append(
            f"The engine won't start: others hold {plan['held_gib']} GiB, so the utilization can be at most "
            f"{plan['highest_utilization']:.2f}"
        )
    return lines


def _band(row: dict[str, Any]) -> str:
    low, high = row["sequences_low"], row["sequences_high"]
    return f"{row['sequences']}" if low == high else f"{row['sequences']} ({low}–{high})"


def _enough(row: dict[str, Any]) -> str:
    if row["reaches_required"] and not row["reaches_required_at_low"]:
        return "likely"
    return "yes" if row["reaches_required"] else "no"


def _variants(plan: dict[str, Any]) -> list[str]:
    by_hand = any(row["by_hand"] for row in plan["variants"])
    header = [
        "variant",
        "weights GiB",
        "KV B/token",
        "budget GiB",
        "KV tokens",
        "log says",
        "sequences",
        "enough",
    ]
    body = []
    for row in plan["variants"]:
        cells = [
            row["variant"], f"{row['weight_gib']:.2f}", f"{row['kappa_bytes']:,}", f"{row['budget_gib']:.2f}",
            f"{row['tokens']:,}", f"{row['logged_sequences']:.2f}x", _band(row), _enough(row),
        ]  # fmt: skip
        if by_hand:
            hand = row["by_hand"]
            cells.insert(7, f"{hand['budget_gib']:.1f} GiB -> {hand['sequences']}" if hand else "")
        body.append(cells)
    if by_hand:
        header.insert(7, "by hand")
    return table(header, body)


def _difference(plan: dict[str, Any]) -> list[str]:
    """The hand calculation's way to the engine's number, all variants side by side."""
    rows = [row for row in plan["variants"] if row["by_hand"]]
    header = ["from the hand calculation to the card", *(row["variant"] for row in rows)]
    body = []
    for position, step in enumerate(rows[0]["by_hand"]["steps"]):
        label = step["term"] if not step["by_hand"] else f"{step['term']}: {_change(rows, position)}"
        body.append([label, *(str(row["by_hand"]["steps"][position]["sequences"]) for row in rows)])
    return table(header, body)


def _change(rows: list[dict[str, Any]], position: int) -> str:
    changes = [
        f"{row['by_hand']['steps'][position]['by_hand']} -> {row['by_hand']['steps'][position]['real']}"
        for row in rows
    ]
    return ", ".join(dict.fromkeys(changes))


def _levers(plan: dict[str, Any]) -> list[str]:
    levers = plan["levers"]
    body = [["(BF16 weights, BF16 KV)", str(levers["start_sequences"]), "", "", ""]]
    body += [
        [
            step["change"], str(step["sequences"]), str(step["alone"]),
            "yes" if step["reaches_required"] else "no", step["risk"],
        ]
        for step in levers["steps"]
    ]  # fmt: skip
    lines = ["Levers, each on top of those before it:"]
    lines += table(["change", "sequences", "alone", "enough", "risk"], body)
    wanted = levers["required_sequences"]
    if levers["smallest_set"] is None:
        lines.append(f"{wanted} can't be reached: all of them together give {levers['closest_sequences']}.")
    elif not levers["smallest_set"]:
        lines.append(f"{wanted} fit without any.")
    else:
        lines.append(f"Fewest that reach {wanted}: {' + '.join(levers['smallest_set'])}.")
    return lines


def _lengths(plan: dict[str, Any]) -> list[str]:
    cells = [
        f"{row['variant']} {row['longest_for_required']:,}"
        if row["longest_for_required"]
        else f"{row['variant']} none"
        for row in plan["variants"]
    ]
    return [f"Longest sequences of which {plan['required_sequences']} fit, in tokens: {', '.join(cells)}"]


def _long_context(plan: dict[str, Any]) -> list[str]:
    long = plan["long_context"]
    lines = [f"One sequence of {long['tokens']:,} tokens:"]
    body = [
        [
            row["variant"], f"{row['gib_per_sequence']:.2f}", str(row["sequences"]),
            f"{row['missing_gib']:.2f} GiB short of one" if not row["sequences"] else "",
        ]
        for row in long["variants"]
    ]  # fmt: skip
    lines += table(["variant", "GiB each", "fit", ""], body)
    if long["above_the_models_own"]:
        lines.append(
            f"The model itself ends at {long['model_max_tokens']:,} tokens: beyond that it needs a rope scaling it was made for."
        )
    return lines


def _workload(plan: dict[str, Any]) -> list[str]:
    load = plan["workload"]
    lines = [
        f"Workload: {load['source']} (mean {load['mean_tokens']:,.0f}, p95 {load['p95_tokens']:,.0f} tokens):"
    ]
    body = [
        [
            row["variant"], f"{row['workload']['expected']:.1f}", str(row["workload"]["at_95"]),
            str(row["workload"]["worst_case"]), f"{row['workload']['mean_waste_tokens']:.1f}",
        ]
        for row in plan["variants"]
    ]  # fmt: skip
    return lines + table(
        ["variant", "expected", "19 times in 20 at least", "all at max_model_len", "unused tokens each"], body
    )


def _too_high(plan: dict[str, Any]) -> list[str]:
    found = plan["utilization_0_99"]
    left = found["left_outside_gib"]
    if left < 0:
        return [
            f"Why not utilization {found['utilization']}: it runs out of memory: beside its share the engine has its own context and "
            f"workspace, and others hold {plan['held_gib']} GiB; {-left:.2f} GiB are missing (at {plan['memory_utilization']} "
            f"{found['left_outside_now_gib']:.2f} are left)."
        ]
    return [
        f"Why not utilization {found['utilization']}: {found['variant']} would gain {found['gained_sequences']} sequences, and "
        f"{left:.2f} GiB would be left outside the engine's share instead of {found['left_outside_now_gib']:.2f}; its own overheads "
        f"may come out {found['overheads_may_exceed_gib']:.2f} GiB above what is planned, and a desktop takes 1 to 2."
    ]


def _overheads(plan: dict[str, Any]) -> list[str]:
    body = [
        [
            term["name"], f"{term['gib']:.2f}", f"{term['low_gib']:.2f}–{term['high_gib']:.2f}",
            "measured on this card" if term["calibrated"] else "computed, not measured on this card", term["driver"],
        ]
        for term in plan["overheads"]
    ]  # fmt: skip
    return table(["overhead", "GiB", "band", "known", "driven by"], body)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Aligned text columns; a column whose cells all start with a digit is right-aligned."""
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    numeric = [
        any(row[column] for row in body) and all(not row[column] or row[column][0].isdigit() for row in body)
        for column in range(len(header))
    ]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [header, *body]
    ]
