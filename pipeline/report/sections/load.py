"""Behaviour under load: what runs at once, what it costs at each concurrency, and how many streams meet the SLO."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.load.compare import (
    Figure,
    Ratio,
    at_level,
    concurrencies,
    control_level,
    effects,
    estimate,
    ratio,
)
from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import fitting_sequences, is_emulated
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import NOT_MEASURED, count, latency, listing, number, percent, sentence, speed
from pipeline.results import Distribution, LoadLevel, Measurement, Probe, SloSearch


def section(bundle: ResultBundle) -> Section:
    """Three questions apart: what fits, what load costs, what meets the SLO."""
    intro = [
        "Three questions, asked apart. The fill test drives the KV pool full with sequences of full length. The levels keep "
        "that many requests in flight to the end, whatever they show: past what the pool or the scheduler takes, requests "
        "wait, so time to first token grows while throughput stays flat. The search looks for the largest concurrency "
        "at which the SLO holds, and ends each probe as soon as it is decided."
    ]
    emulated = [name for name in bundle.variants if is_emulated(bundle.verdict.variants[name])]
    if emulated:
        intro.append(
            f"{listing(emulated)}: speed measured on emulated kernels. It shows the shape of the curve, not what the "
            "stock kernel would reach."
        )
    unmeasured = [name for name in bundle.variants if bundle.measurements.get(name) is None]
    if unmeasured:
        intro.append(f"{listing(unmeasured)}: not measured.")
    tables = [answers_table(bundle), fill_table(bundle), levels_table(bundle)]
    optional = [ratios_table(bundle), effects_table(bundle), probes_table(bundle)]
    return Section("load", "Load", intro, [*tables, *(table for table in optional if table.rows)])


def answers_table(bundle: ResultBundle) -> Table:
    """Fits, observed peak and the loads under the SLO: one row per variant."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        fits = bundle.verdict.variants[variant].capacity
        row = [
            name(variant, tags=_tags(bundle, variant)),
            figure(count(fitting_sequences(fits))),
            figure(count(fits.observed_peak_running if measured and fits else None)),
            _under_slo(measured, "closed"),
            _under_slo(measured, "open"),
        ]
        rows.append(row)
    return Table(
        "Fits, runs, meets the SLO",
        [
            Column("Variant"),
            Column("Fits", "whole sequences of max_model_len, by the engine's own count", True),
            Column("Most running at once", "seen in the fill test", True),
            Column(
                "Streams under the SLO",
                "closed loop: largest that passed, to largest not shown to fail",
                True,
            ),
            Column("Requests/s under the SLO", "open loop, latency from the scheduled arrival", True),
        ],
        rows,
    )


def _tags(bundle: ResultBundle, variant: str) -> tuple[str, ...]:
    return ("emulated kernel",) if is_emulated(bundle.verdict.variants[variant]) else ()


def _under_slo(measured: Measurement | None, mode: str) -> Cell:
    found = [search for search in measured.searches if search.mode == mode] if measured else []
    if not found:
        return Cell(NOT_MEASURED, "missing")
    search = found[0]
    limits = (
        f"p{search.percentile * 100:g} TTFT ≤ {latency(search.ttft_ms)} ms, TPOT ≤ {latency(search.tpot_ms)} ms at "
        f"{100 * search.confidence:g} % confidence; {search.requests:,} requests in {len(search.probes)} probes"
    )
    return Cell(interval(search), "number", f"{sentence(search.note)}\n{limits}")


def interval(search: SloSearch) -> str:
    """The answer as an interval, one number where both ends are the same."""
    digits = 0 if search.mode == "closed" else 2
    low = "none" if search.low is None else number(search.low, digits)
    if search.high is None:
        return f"{low} or more" if search.low is not None else "undecided"
    if search.low is None:
        return "none" if search.high < 1 else f"none to {number(search.high, digits)}"
    high = number(search.high, digits)
    return low if low == high else f"{low} to {high}"


def fill_table(bundle: ResultBundle) -> Table:
    """The fill test of every variant that had one."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        fill = measured.fill if measured else None
        if fill is None:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 7])
            continue
        agreement = {True: "within one", False: "differs", None: NOT_MEASURED}[fill.agrees]
        rows.append(
            [
                name(variant),
                figure(
                    f"{fill.offered:,}", note=f"{fill.prompt_tokens:,} + {fill.output_tokens:,} tokens each"
                ),
                figure(count(fill.predicted_running)),
                figure(count(fill.observed_peak_running)),
                Cell(agreement, note=sentence(fill.note)),
                figure(count(fill.waiting_at_peak)),
                figure(percent(fill.observed_peak_kv_usage, 0)),
                figure(count(fill.preemptions)),
            ]
        )
    return Table(
        "Fill test: the pool driven full with sequences of full length",
        [
            Column("Variant"),
            Column("Offered", "requests in flight", True),
            Column("Predicted to run", "by the planner; the null block takes one block", True),
            Column("Ran at once", numeric=True),
            Column("Agreement"),
            Column("Waited", numeric=True),
            Column("KV usage", numeric=True),
            Column("Preemptions", numeric=True),
        ],
        rows,
    )


def levels_table(bundle: ResultBundle) -> Table:
    """One row per variant, level and repeat."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        if measured is None or not measured.levels:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 12])
            continue
        tags = _tags(bundle, variant)
        for index, level in enumerate(measured.levels):
            rows.append([name(variant, tags=tags) if index == 0 else name(""), *_cells(level)])
    return Table(
        "Load levels",
        [
            Column("Variant"),
            Column("Streams", "requests kept in flight", True),
            Column("Done / sent", "completed and sent requests, warm-up included", True),
            Column("Output tok/s", "over the whole run; below: between ramp and drain", True),
            Column("Goodput (req/s)", "requests within the SLO", True),
            Column("TTFT p50 (ms)", "time to first token", True),
            Column("TTFT p90 (ms)", numeric=True),
            Column("TPOT p50 (ms)", "time per output token after the first", True),
            Column("TPOT p90 (ms)", numeric=True),
            Column("E2EL p50 (ms)", "end-to-end latency", True),
            Column("Peak running / waiting", numeric=True),
            Column("Preemptions", numeric=True),
            Column("Prefix hits", "share of prompt tokens found in the prefix cache", True),
        ],
        rows,
    )


def _cells(level: LoadLevel) -> list[Cell]:
    queue = [level.peak_running, level.peak_waiting]
    notes = [f"{level.failed:,} failed"] if level.failed else []
    notes += [f"{level.warmup:,} of them warm-up"] if level.warmup else []
    return [
        figure(f"{level.concurrency:,}", note=f"repeat {level.repeat}" if level.repeat > 1 else ""),
        figure(f"{level.completed:,} / {level.requests:,}", note="\n".join(notes)),
        figure(speed(level.output_throughput_tok_s), note=_steady(level)),
        figure(number(level.goodput_rps)),
        _percentile(level.ttft, "p50"),
        _percentile(level.ttft, "p90"),
        _percentile(level.tpot, "p50"),
        _percentile(level.tpot, "p90"),
        _percentile(level.e2el, "p50"),
        figure(NOT_MEASURED if queue == [None, None] else " / ".join(count(value) for value in queue)),
        figure(count(level.preemptions)),
        figure(percent(level.prefix_cache_hit_rate)),
    ]


def _steady(level: LoadLevel) -> str:
    steady = level.steady
    if steady is None:
        return ""
    if steady.output_throughput_tok_s is None:
        return f"no steady window: {steady.note}"
    return f"steady: {speed(steady.output_throughput_tok_s)}"


def _percentile(found: Distribution, which: str) -> Cell:
    """The figure, or how many requests it takes, or that it falls on a failed request."""
    value = getattr(found, f"{which}_ms")
    if which in found.needs:
        return Cell(f"needs {found.needs[which]}", "missing", f"{found.n} measured")
    if value is None and found.n:
        return Cell("failed", "missing", "it falls on a failed request")
    return figure(latency(value))


RATIOS: tuple[tuple[str, Figure], ...] = (
    ("output tok/s", lambda level: level.output_throughput_tok_s),
    ("TTFT p50", lambda level: level.ttft.p50_ms),
    ("TPOT p50", lambda level: level.tpot.p50_ms),
)


def ratios_table(bundle: ResultBundle) -> Table:
    """Every variant against the reference, level by level; intervals by bootstrap over repeats."""
    base = bundle.measurements.get(bundle.verdict.reference)
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        if base is None or measured is None:
            continue
        own = variant == bundle.verdict.reference
        for index, level in enumerate(concurrencies(measured)):
            values = [at_level(measured, level, value) for _, value in RATIOS]
            compared = [
                None if own else ratio(at_level(base, level, value), found)
                for (_, value), found in zip(RATIOS, values, strict=True)
            ]
            rows.append(
                [
                    name(variant, tags=_tags(bundle, variant)) if index == 0 else name(""),
                    figure(f"{level:,}"),
                    _mean_cell(values[0]),
                    *(Cell("reference") if own else ratio_cell(found) for found in compared),
                ]
            )
    return Table(
        "Against the reference (ratio, interval by bootstrap over repeats)",
        [
            Column("Variant"),
            Column("Streams", numeric=True),
            Column("Output tok/s", "mean over repeats", True),
            *(Column(f"{title}, ratio", numeric=True) for title, _ in RATIOS),
        ],
        rows,
    )


def _mean_cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell(NOT_MEASURED, "missing")
    found = estimate(values)
    notes = [f"[{speed(found.interval[0])}, {speed(found.interval[1])}]"] if found.interval else []
    notes += [f"drifts over its {found.repeats} repeats"] if found.drifts else []
    notes += [] if found.interval else [f"{found.repeats} of 3 repeats: no interval"]
    return figure(speed(found.value), note="\n".join(notes))


def ratio_cell(found: Ratio | None) -> Cell:
    """A ratio with its interval; one means no change."""
    if found is None:
        return Cell(NOT_MEASURED, "missing")
    note = f"[{number(found.interval[0])}, {number(found.interval[1])}]" if found.interval else ""
    return figure(f"{number(found.value)}×", note=note)


def effects_table(bundle: ResultBundle) -> Table:
    """What an FP8 KV cache changes, split: pairs of variants with the same weights."""
    planned = {row.variant: row for row in bundle.plan.rows}
    rows = []
    for variant in bundle.variants:
        own = planned.get(variant)
        if own is None or not own.kv_cache_dtype.startswith("fp8"):
            continue
        partner = next(
            (
                other
                for other in bundle.variants
                if other in planned
                and planned[other].weights == own.weights
                and not planned[other].kv_cache_dtype.startswith("fp8")
                and other != bundle.verdict.control
            ),
            None,
        )
        base, measured = bundle.measurements.get(partner or ""), bundle.measurements.get(variant)
        if base is None or measured is None:
            continue
        heading = name(f"{partner} → {variant}", tags=_tags(bundle, variant))
        for index, effect in enumerate(effects(base, measured)):
            rows.append(
                [
                    heading if index == 0 else name(""),
                    words(effect.part),
                    ratio_cell(effect.ratio),
                    words(effect.what),
                ]
            )
        if control_level(base) is None:
            rows.append(
                [name(""), words("control"), Cell(NOT_MEASURED, "missing"), words("no level fits the pool")]
            )
    return Table(
        "What FP8 KV changes, part by part",
        [Column("Variants"), Column("Part"), Column("Ratio", "FP8 / BF16 KV", True), Column("Of what")],
        rows,
    )


def probes_table(bundle: ResultBundle) -> Table:
    """Every probe of every search."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        for search in measured.searches if measured else []:
            for index, probe in enumerate(sorted(search.probes, key=lambda probe: probe.load)):
                heading = name(variant, tags=_tags(bundle, variant)) if index == 0 else name("")
                rows.append([heading, figure(f"{probe.load:.4g} {search.unit}"), *_probe_cells(probe)])
    return Table(
        "Probes of the searches",
        [
            Column("Variant"),
            Column("Load", numeric=True),
            Column("Decision"),
            Column("Judged / sent", "requests judged after the warm-up, and all sent", True),
            Column("Over TTFT", numeric=True),
            Column("Over TPOT", numeric=True),
            Column("TTFT seen (ms)", "at the SLO's percentile", True),
            Column("TPOT seen (ms)", "at the SLO's percentile", True),
            Column("Schedule lag p99 (ms)", "open loop only", True),
            Column("Client CPU", "of one core", True),
        ],
        rows,
    )


def _probe_cells(probe: Probe) -> list[Cell]:
    lag = (
        Cell("closed loop", "text")
        if probe.schedule_lag_p99_ms is None
        else figure(latency(probe.schedule_lag_p99_ms))
    )
    return [
        Cell(probe.decision, note="the client was saturated" if probe.client_saturated else ""),
        figure(
            f"{probe.judged:,} / {probe.requests:,}", note=f"{probe.failed:,} failed" if probe.failed else ""
        ),
        figure(count(probe.over_ttft)),
        figure(count(probe.over_tpot)),
        figure(latency(probe.ttft_ms)),
        figure(latency(probe.tpot_ms)),
        lag,
        figure(percent(probe.client_cpu_share, 0)),
    ]
