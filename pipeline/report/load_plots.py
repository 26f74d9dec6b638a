"""The load section's plots: cost over concurrency, probes against the SLO, ITL, and the server's state over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from pipeline.load.compare import at_level, concurrencies
from pipeline.report.bundle import ResultBundle
from pipeline.report.drawing import Canvas, Plot
from pipeline.report.palette import BAND, INK, LIMIT, SERIES, SURFACE, Styles
from pipeline.report.reading import is_emulated
from pipeline.report.wording import latency, speed
from pipeline.results import LoadLevel, Probe

PANEL_INCHES = 3.95  # three side by side in the page's width
RUNNING, WAITING, KV_USAGE = SERIES[0], SERIES[7], SERIES[4]  # the page's legend names these
LIMIT_DASHES = (0, (5, 3))


@dataclass(frozen=True)
class Curve:
    """One figure of merit over concurrency. `limit` is the SLO's key for it."""

    key: str
    title: str
    value: Callable[[LoadLevel], float | None]
    text: Callable[[float | None], str]
    logarithmic: bool = False
    limit: str | None = None


CURVES = (
    Curve("throughput", "Output throughput (tok/s)", lambda level: level.output_throughput_tok_s, speed),
    Curve(
        "ttft",
        "Time to first token, p50 (ms, log scale)",
        lambda level: level.ttft.p50_ms,
        latency,
        logarithmic=True,
        limit="ttft_ms",
    ),
    Curve(
        "tpot", "Time per output token, p50 (ms)", lambda level: level.tpot.p50_ms, latency, limit="tpot_ms"
    ),
)


def load_plots(bundle: ResultBundle) -> list[Plot]:
    """Curves over concurrency, the probes, ITL, then each variant's timeline."""
    measured = [found for found in bundle.measurements.values() if found]
    streams = sorted({level.concurrency for found in measured for level in found.levels})
    curves = [_curve(bundle, curve, streams) for curve in CURVES] if streams else []
    return [
        *curves,
        *_probe_plots(bundle),
        *_itl(bundle),
        *(_timeline(bundle, variant) for variant in bundle.variants if bundle.timelines.get(variant)),
    ]


def _styles(bundle: ResultBundle) -> Styles:
    return Styles(bundle.variants, bundle.verdict.control)


def _dashes(bundle: ResultBundle, variant: str) -> Any:
    return (0, (4, 1.5)) if is_emulated(bundle.verdict.variants[variant]) else "-"


def _curve(bundle: ResultBundle, curve: Curve, streams: list[int]) -> Plot:
    """A line per variant, the mean over repeats; a level without the number leaves a gap."""
    style = _styles(bundle)
    limit = _limit(bundle, curve.limit)
    with Canvas(curve.key, curve.title, width=PANEL_INCHES, height=2.7) as canvas:
        axes = canvas.axes
        highest = 0.0
        for variant in bundle.variants:
            measured = bundle.measurements.get(variant)
            levels = concurrencies(measured) if measured else []
            values = [_mean(at_level(measured, level, curve.value)) for level in levels] if measured else []
            highest = max([highest, *(value for value in values if not math.isnan(value))])
            colour = style.colour(variant)
            # Where nothing is wrong the control lies on the reference, so it is drawn below and larger.
            is_control = variant == bundle.verdict.control
            axes.plot(
                levels,
                values,
                color=colour,
                linestyle=_dashes(bundle, variant),
                zorder=1.5 if is_control else 2,
            )
            for level, value in zip(levels, values, strict=True):
                if math.isnan(value):
                    continue
                size = 9 if is_control else 5
                mark = axes.plot(level, value, style.marker(variant), color=colour, markersize=size)[0]
                mark.set_gid(canvas.tip(f"{variant} at {level} streams: {curve.text(value)}"))
        if limit is not None and (curve.logarithmic or limit < 4 * highest):
            _limit_line(axes, limit, f"SLO {latency(limit)}")
        axes.set_xticks(streams)
        axes.set_xlim(0, max(streams) * 1.05)
        axes.set_xlabel("concurrent streams")
        _vertical_scale(axes, curve.logarithmic)
        return canvas.plot()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _limit(bundle: ResultBundle, key: str | None) -> float | None:
    slo = bundle.facts.get("slo")
    value = slo.get(key) if isinstance(slo, dict) and key else None
    return float(value) if isinstance(value, (int, float)) else None


def _limit_line(axes: Axes, limit: float, text: str) -> None:
    axes.axhline(limit, color=LIMIT, linestyle=LIMIT_DASHES, linewidth=1.4, zorder=1)
    axes.annotate(
        text,
        (0, limit),
        xycoords=("axes fraction", "data"),
        xytext=(3, 3),
        textcoords="offset points",
        color=LIMIT,
        va="bottom",
    )


def _vertical_scale(axes: Axes, logarithmic: bool) -> None:
    """Plain numbers on either scale, and a linear one that starts at zero."""
    if not logarithmic:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())


def _probe_plots(bundle: ResultBundle) -> list[Plot]:
    """What each probe saw at the SLO's percentile, against its limits; hollow where it didn't pass."""
    searches = {
        variant: search
        for variant in bundle.variants
        if (measured := bundle.measurements.get(variant))
        for search in measured.searches
        if search.mode == "closed"
    }
    if not searches:
        return []
    first = next(iter(searches.values()))
    share = f"p{first.percentile * 100:g}"
    drawn: tuple[tuple[str, str, float, Callable[[Probe], float | None]], ...] = (
        ("ttft", "Time to first token", first.ttft_ms, lambda probe: probe.ttft_ms),
        ("tpot", "Time per output token", first.tpot_ms, lambda probe: probe.tpot_ms),
    )
    style = _styles(bundle)
    plots = []
    for key, title, limit, value in drawn:
        with Canvas(
            f"probe-{key}",
            f"{title}, {share} seen by the probes (ms, log scale)",
            width=PANEL_INCHES,
            height=2.7,
            note="Filled: the probe passed. Hollow: it failed or was undecided.",
        ) as canvas:
            axes = canvas.axes
            for variant, search in searches.items():
                probes = sorted(search.probes, key=lambda probe: probe.load)
                colour = style.colour(variant)
                heights = [math.nan if value(probe) is None else value(probe) for probe in probes]
                axes.plot(
                    [probe.load for probe in probes],
                    heights,
                    color=colour,
                    linestyle=_dashes(bundle, variant),
                )
                for probe, height in zip(probes, heights, strict=True):
                    if height is None or math.isnan(height):
                        continue
                    filled = colour if probe.decision == "pass" else SURFACE
                    mark = axes.plot(
                        probe.load,
                        height,
                        style.marker(variant),
                        color=colour,
                        markerfacecolor=filled,
                        markersize=5.5,
                    )[0]
                    mark.set_gid(
                        canvas.tip(f"{variant} at {probe.load:g}: {latency(height)} ms, {probe.decision}")
                    )
            _limit_line(axes, limit, f"SLO {latency(limit)}")
            axes.set_xlim(left=0)
            axes.set_xlabel("concurrent streams")
            _vertical_scale(axes, logarithmic=True)
            plots.append(canvas.plot())
    return plots


def _itl(bundle: ResultBundle) -> list[Plot]:
    """Share of the gaps between chunks that are at most so long, at the highest level that every variant ran."""
    levels = {
        variant: max(measured.levels, key=lambda level: level.concurrency)
        for variant in bundle.variants
        if (measured := bundle.measurements.get(variant)) and measured.levels
    }
    shown = {variant: level for variant, level in levels.items() if level.itl_ecdf_ms}
    if not shown:
        return []
    streams = max(level.concurrency for level in shown.values())
    style = _styles(bundle)
    with Canvas(
        "itl",
        f"Inter-token latency at {streams} streams (share of gaps, log scale)",
        width=PANEL_INCHES,
        height=2.7,
        note="Per chunk. A gap with another request's prefill in it is long, one without is short.",
    ) as canvas:
        axes = canvas.axes
        for variant, level in shown.items():
            points = [(value, step * 5) for step, value in enumerate(level.itl_ecdf_ms) if value]
            axes.plot(
                [value for value, _ in points],
                [share for _, share in points],
                color=style.colour(variant),
                linestyle=_dashes(bundle, variant),
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, 102)
        axes.set_xlabel("milliseconds between chunks")
        axes.set_ylabel("% of gaps")
        return [canvas.plot()]


def _timeline(bundle: ResultBundle, variant: str) -> Plot:
    """Requests running and waiting above, KV usage below, on one time axis; all variants on the same scales."""
    rows = bundle.timelines[variant]
    everyone = [row for own in bundle.timelines.values() for row in own]
    highest = max((row.get(key) or 0 for row in everyone for key in ("running", "waiting")), default=0)
    longest = max((own[-1]["t_s"] - own[0]["t_s"] for own in bundle.timelines.values() if own), default=1)
    seconds = [row["t_s"] - rows[0]["t_s"] for row in rows]
    measured = bundle.measurements.get(variant)
    fill = measured.fill if measured else None

    def series(key: str, scale: float = 1.0) -> list[float]:
        return [math.nan if row.get(key) is None else scale * row[key] for row in rows]

    key = f"timeline-{bundle.variants.index(variant)}"
    note = "Grey: the fill test, with the number predicted to run." if fill else ""
    with Canvas(key, f"{variant} over time", width=PANEL_INCHES, height=3.1, rows=2, note=note) as canvas:
        requests, usage = canvas.panels
        if fill is not None:
            begin, end = fill.start_s - rows[0]["t_s"], fill.end_s - rows[0]["t_s"]
            for panel in canvas.panels:
                panel.axvspan(begin, end, color=BAND, linewidth=0, zorder=0)
            if fill.predicted_running is not None:
                requests.plot([begin, end], [fill.predicted_running] * 2, color=INK, linewidth=1.2)
        _area(requests, seconds, series("running"), RUNNING)
        requests.step(
            seconds, series("waiting"), where="post", color=WAITING, linewidth=1.4, linestyle=(0, (3, 1))
        )
        requests.set_ylim(0, max(1, highest) * 1.08)
        requests.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        requests.set_ylabel("requests")
        _area(usage, seconds, series("kv_usage", 100), KV_USAGE)
        usage.set_ylim(0, 108)
        usage.set_yticks([0, 50, 100])
        usage.set_ylabel("KV usage (%)")
        usage.set_xlim(0, max(1, longest))
        usage.set_xlabel("seconds")
        return canvas.plot()


def _area(axes: Axes, xs: list[float], ys: list[float], colour: str) -> None:
    axes.fill_between(xs, ys, step="post", color=colour, alpha=0.35, linewidth=0)
    axes.step(xs, ys, where="post", color=colour, linewidth=1.4)
