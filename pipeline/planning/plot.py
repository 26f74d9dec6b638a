"""Concurrency against context, one line per variant with its band and the target drawn, as PNG or as one HTML file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.capacity import Row
from pipeline.errors import UserInputError
from pipeline.files import write_bytes, write_text

COLOURS = ("#1f5fa8", "#c2571a", "#2f8f5b", "#8a4fa3", "#a8323e", "#5c6570")
DOTS_PER_INCH = 150


def write_plot(rows: Sequence[Row], plan: dict[str, Any], path: Path) -> Path:
    """Draw the plan's rows to `path`, whose ending chooses the format; `UserInputError` for another one."""
    if path.suffix not in (".png", ".html"):
        raise UserInputError(f"--plot {path}: the file's name must end in .png or .html")
    image = _draw(rows, plan)
    if path.suffix == ".png":
        return write_bytes(path, image)
    title = html.escape(f"{plan['model']} on {plan['device']}: sequences against context")
    data = base64.b64encode(image).decode("ascii")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:15px system-ui,sans-serif;margin:2rem;max-width:60rem}img{max-width:100%}"
        "td,th{padding:.2rem .8rem;text-align:right}td:first-child,th:first-child{text-align:left}</style>"
        f'<h1>{title}</h1><img alt="{title}" src="data:image/png;base64,{data}">{_table(plan)}</html>\n'
    )
    return write_text(path, page)


def _table(plan: dict[str, Any]) -> str:
    head = "".join(f"<th>{name}" for name in ("variant", "KV tokens", "sequences", "band"))
    rows = "".join(
        f"<tr><td>{html.escape(row['variant'])}<td>{row['tokens']:,}<td>{row['sequences']}"
        f"<td>{row['sequences_low']}–{row['sequences_high']}"
        for row in plan["variants"]
    )
    return f"<p>At {plan['max_model_len']:,} tokens per sequence:</p><table><tr>{head}{rows}</table>"


def _draw(rows: Sequence[Row], plan: dict[str, Any]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    lengths = _lengths(plan["block_size"], plan["long_context"]["model_max_tokens"])
    for index, row in enumerate(rows):
        budgets = (row.budget.bytes, row.budget.low_bytes, row.budget.high_bytes)
        fits, low, high = (
            [row.layout.pool(max(0, budget), length).fitting_sequences for length in lengths]
            for budget in budgets
        )
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(lengths, fits, color=colour, label=f"{row.variant}: {row.pool.fitting_sequences}")
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
    required = plan["required_sequences"]
    axes.axhline(required, color="#444", linestyle="--", linewidth=1)
    axes.annotate(
        f"{required} wanted", (lengths[0], required), (4, 4), textcoords="offset points", fontsize=9
    )
    axes.axvline(plan["max_model_len"], color="#999", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0.8)
    axes.set_xlabel("tokens per sequence")
    axes.set_ylabel("whole sequences that fit")
    axes.grid(True, which="major", color="#ddd", linewidth=0.6)
    axes.set_title(f"{plan['model']} on {plan['device']}, vLLM {plan['engine_version']}", fontsize=11)
    axes.legend(title=f"at {plan['max_model_len']:,} tokens", frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def _lengths(block_size: int, longest: int) -> list[int]:
    """Eight points per doubling, from four blocks (at least 64 tokens) to the model's own length."""
    start, points = max(64, 4 * block_size), []
    length = float(start)
    while length < longest:
        points.append(round(length))
        length *= 2**0.125
    return [*points, longest]
