"""The report's plots, by section. Every one has its numbers in a table of the same section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pipeline.report.bundle import ResultBundle
from pipeline.report.drawing import Canvas, Plot
from pipeline.report.load_plots import load_plots
from pipeline.report.palette import BAND, CONTROL, INK, LIMIT, MARKERS, MUTED, SERIES, SURFACE, Styles
from pipeline.report.reading import fitting_sequences, required_sequences
from pipeline.report.times import stage_rows
from pipeline.report.wording import count, points, points_interval
from pipeline.results import Capacity, QualityDelta

WIDE_INCHES = 8.8
ROW_INCHES = 0.42
LIMIT_DASHES = (0, (5, 3))
PHASES = ("engine start", "fill", "levels", "search", "eval", "divergence", "quantization", "proof")
"""What a stage's bar is made of, in the series' colours; all else is other."""


def plots_of(bundle: ResultBundle, section: str) -> list[Plot]:
    """The plots of the section with this key, none where nothing was measured."""
    drawers: dict[str, Callable[[ResultBundle], list[Plot]]] = {
        "capacity": ladder,
        "load": load_plots,
        "quality": forest,
        "quantization": layer_errors,
        "time": stage_times,
    }
    return drawers[section](bundle) if section in drawers else []


def styles(bundle: ResultBundle) -> Styles:
    """Colour and marker by variant, the same in every plot."""
    return Styles(bundle.variants, bundle.verdict.control)


def ladder(bundle: ResultBundle) -> list[Plot]:
    """Sequences that fit by variant, with what was predicted, what was seen running, and what is needed."""
    needed = required_sequences(bundle.verdict) or bundle.plan.required_sequences
    planned = {row.variant: row.capacity for row in bundle.plan.rows}
    note = "Bar: whole sequences that fit by the engine's own report. Line across it: predicted. Ring: most seen running."
    if bundle.plan.device_emulated:
        note += " Emulated memory budget, not a card."
    height = 0.9 + ROW_INCHES * len(bundle.variants)
    title = "Whole sequences that fit, by variant"
    with Canvas("ladder", title, width=WIDE_INCHES, height=height, note=note) as canvas:
        axes = canvas.axes
        highest = float(needed)
        for row, variant in enumerate(bundle.variants):
            found = bundle.verdict.variants[variant].capacity or planned.get(variant)
            highest = max(highest, _rung(canvas, row, variant, found))
        axes.axvline(needed, color=LIMIT, linestyle=LIMIT_DASHES, linewidth=1.6, zorder=3)
        _beside(axes, f"needed: {needed}", (needed, -0.58), (4, 0), color=LIMIT)
        axes.set_yticks(range(len(bundle.variants)), bundle.variants)
        axes.set_ylim(len(bundle.variants) - 0.4, -1.05)
        axes.set_xlim(0, highest * 1.14)
        axes.set_xlabel("sequences of max_model_len tokens")
        axes.grid(axis="y", visible=False)
        return [canvas.plot()]


def _rung(canvas: Canvas, row: int, variant: str, found: Capacity | None) -> float:
    """One variant's bar and marks; returns how far right they reach."""
    axes = canvas.axes
    predicted = found.predicted_fitting_sequences if found else None
    reported = fitting_sequences(found)
    running = found.observed_peak_running if found else None
    if reported is not None:
        bar = axes.barh(row, reported, height=0.56, color=SERIES[0])[0]
        bar.set_gid(canvas.tip(f"{variant}: predicted {count(predicted)}, reported {count(reported)}"))
    if predicted is not None:
        axes.plot([predicted] * 2, [row - 0.38, row + 0.38], color=INK, linewidth=2, solid_capstyle="butt")
    if running is not None:
        ring = axes.plot(running, row, "o", markersize=8, markerfacecolor=SURFACE, markeredgecolor=INK)[0]
        ring.set_gid(canvas.tip(f"{variant}: at most {running} seen running"))
    text = count(reported) if reported is not None else f"{count(predicted)} predicted; engine not measured"
    edge = max((value for value in (predicted, reported, running) if value is not None), default=0)
    _beside(axes, text, (edge, row), (9, 0))
    return float(edge)


def _beside(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Text at a data point, moved by `offset` points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", va="center", **style)


def forest(bundle: ResultBundle) -> list[Plot]:
    """Accuracy change with its interval by variant, the margin as a line and the A/A control's interval as a band."""
    verdict = bundle.verdict
    deltas = {name: verdict.variants[name].quality for name in bundle.variants if name != verdict.reference}
    known = [delta for delta in deltas.values() if delta and delta.delta is not None and delta.delta_ci]
    if not known:
        return []
    control = deltas.get(verdict.control) if verdict.control else None
    note = f"Point and {100 * known[0].confidence:.0f} % interval."
    if control and control.delta_ci:
        note += f" Grey band: the interval of the A/A control {verdict.control}."
    height = 1.0 + ROW_INCHES * len(deltas)
    title = "Accuracy change against the reference"
    with Canvas("forest", title, width=WIDE_INCHES, height=height, note=note) as canvas:
        axes, style = canvas.axes, styles(bundle)
        if control and control.delta_ci:
            low, high = control.delta_ci
            axes.axvspan(100 * low, 100 * high, color=BAND, linewidth=0, zorder=0)
        axes.axvline(0, color=MUTED, linewidth=1)
        for row, (variant, delta) in enumerate(deltas.items()):
            _effect(canvas, row, variant, delta, style)
        _forest_axes(axes, list(deltas), known)
        return [canvas.plot()]


def _effect(canvas: Canvas, row: int, variant: str, delta: QualityDelta | None, style: Styles) -> None:
    """One variant's point, interval and numbers."""
    axes = canvas.axes
    edge: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    if delta is None or delta.delta is None or delta.delta_ci is None:
        axes.text(1.015, row, "not measured", color=MUTED, **edge)
        return
    text = f"{points(delta.delta)} {points_interval(delta.delta_ci)}"
    colour = style.colour(variant)
    axes.plot(
        [100 * end for end in delta.delta_ci], [row, row], color=colour, linewidth=2.4, solid_capstyle="butt"
    )
    mark = axes.plot(100 * delta.delta, row, style.marker(variant), color=colour, markersize=7)[0]
    mark.set_gid(canvas.tip(f"{variant}: {text} pt"))
    axes.text(1.015, row, text, **edge)


def _forest_axes(axes: Axes, variants: list[str], known: list[QualityDelta]) -> None:
    """The margin, and limits that show it and every interval."""
    margin = 100 * known[0].margin
    axes.axvline(-margin, color=LIMIT, linestyle=LIMIT_DASHES, linewidth=1.6)
    _beside(axes, f"margin {points(-known[0].margin)}", (-margin, -0.58), (-4, 0), color=LIMIT, ha="right")
    ends = [100 * end for delta in known for end in delta.delta_ci or ()] + [-margin, 0.0]
    space = 0.06 * (max(ends) - min(ends))
    axes.set_xlim(min(ends) - space, max(ends) + space)
    axes.set_ylim(len(variants) - 0.4, -1.05)
    axes.set_yticks(range(len(variants)), variants)
    axes.set_xlabel("points of accuracy, variant \u2212 reference")
    axes.grid(axis="y", visible=False)


def layer_errors(bundle: ResultBundle) -> list[Plot]:
    """Effective weight error by layer, a line per scheme, between the limits of a layer."""
    drawn = {scheme: record for scheme, record in bundle.quantizations.items() if record.bits < 16}
    if not drawn:
        return []
    note = "Mean over a layer's modules, AWQ's scale folding undone. Dashed: what a layer may have."
    title = "Effective weight error by layer (%)"
    with Canvas("errors", title, width=WIDE_INCHES, height=2.6, note=note) as canvas:
        axes = canvas.axes
        for index, (scheme, record) in enumerate(drawn.items()):
            errors = record.effective_error.per_layer
            axes.plot(
                range(len(errors)),
                [100 * error for error in errors],
                marker=MARKERS[index % len(MARKERS)],
                color=SERIES[index % len(SERIES)],
                label=scheme,
            )
            for layer, error in enumerate(errors):
                point = axes.plot(layer, 100 * error, "o", markersize=9, alpha=0)[0]
                point.set_gid(canvas.tip(f"{scheme}, layer {layer}: {100 * error:.1f} %"))
        for limit in sorted(
            {end for record in drawn.values() for end in record.effective_error.layer_range or ()}
        ):
            axes.axhline(100 * limit, color=LIMIT, linestyle=LIMIT_DASHES, linewidth=1.2)
        axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return [canvas.plot()]


def stage_times(bundle: ResultBundle) -> list[Plot]:
    """A bar per stage, its phases one after another."""
    rows = stage_rows(bundle)
    if not rows:
        return []
    tasks = {task for found in bundle.qualities.values() if found for task in (found.task, *found.further)}
    colours = dict(zip(PHASES, SERIES)) | {"other": CONTROL}
    title = "Seconds by stage and phase"
    with Canvas("time", title, width=WIDE_INCHES, height=1.1 + 0.24 * len(rows)) as canvas:
        axes = canvas.axes
        met: dict[str, Any] = {}
        for place, row in enumerate(rows):
            named = sum(phase.seconds for phase in row.phases)
            parts = [(_kind(phase.name, tasks), phase.name, phase.seconds) for phase in row.phases]
            parts.append(("other", "other" if row.phases else row.stage, max(0.0, row.seconds - named)))
            left = 0.0
            for kind, name, seconds in parts:
                if seconds > 0:
                    bar = axes.barh(place, seconds, left=left, height=0.62, color=colours[kind])
                    bar[0].set_gid(canvas.tip(f"{row.stage}: {name} {seconds:,.1f} s"))
                    met.setdefault(kind, bar)
                left += seconds
        shown = [kind for kind in colours if kind in met]
        axes.legend(
            [met[kind] for kind in shown], shown, frameon=False, ncols=len(shown), loc="lower right",
            bbox_to_anchor=(1, 1), borderaxespad=0, handlelength=1.0, columnspacing=1.2,
        )  # fmt: skip
        axes.set_yticks(range(len(rows)), [row.stage for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
        return [canvas.plot()]


def _kind(phase: str, tasks: set[str]) -> str:
    """Which of the bar's parts a phase is."""
    if phase in tasks:
        return "eval"
    if phase.endswith(" search"):
        return "search"
    return phase if phase in PHASES else "other"
