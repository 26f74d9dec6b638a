"""Behaviour under load: throughput, latency and what the scheduler did, level by level."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import is_emulated
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name
from pipeline.report.wording import NOT_MEASURED, count, latency, listing, percent, speed
from pipeline.results import LoadLevel


def section(bundle: ResultBundle) -> Section:
    """The levels of every variant."""
    intro = [
        "Closed-loop load: at each level that many requests are kept in flight. Past the KV pool's limit requests "
        "wait, so time to first token grows while throughput stays flat."
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
    return Section("load", "Load", intro, [levels_table(bundle)])


def levels_table(bundle: ResultBundle) -> Table:
    """One row per variant and level."""
    rows = []
    for variant in bundle.variants:
        measured = bundle.measurements.get(variant)
        tags = ("emulated kernel",) if is_emulated(bundle.verdict.variants[variant]) else ()
        if measured is None or not measured.levels:
            rows.append([name(variant), *[Cell(NOT_MEASURED, "missing")] * 12])
            continue
        for index, level in enumerate(measured.levels):
            rows.append([name(variant, tags=tags) if index == 0 else name(""), *_cells(level)])
    return Table(
        "Load levels",
        [
            Column("Variant"),
            Column("Streams", "requests kept in flight", True),
            Column("Done / sent", "completed and sent requests", True),
            Column("Output tok/s", numeric=True),
            Column("TTFT p50 (ms)", "time to first token", True),
            Column("TTFT p90 (ms)", numeric=True),
            Column("TPOT p50 (ms)", "time per output token after the first", True),
            Column("TPOT p90 (ms)", numeric=True),
            Column("E2EL p50 (ms)", "end-to-end latency", True),
            Column("Peak running / waiting", numeric=True),
            Column("Peak KV usage", numeric=True),
            Column("Preemptions", numeric=True),
            Column("Prefix hits", "share of prompt tokens found in the prefix cache", True),
        ],
        rows,
    )


def _cells(level: LoadLevel) -> list[Cell]:
    queue = [level.peak_running, level.peak_waiting]
    return [
        figure(f"{level.concurrency:,}"),
        figure(
            f"{level.completed:,} / {level.requests:,}",
            note=f"{level.failed:,} failed" if level.failed else "",
        ),
        figure(speed(level.output_throughput_tok_s)),
        figure(latency(level.ttft.p50_ms)),
        figure(latency(level.ttft.p90_ms)),
        figure(latency(level.tpot.p50_ms)),
        figure(latency(level.tpot.p90_ms)),
        figure(latency(level.e2el.p50_ms)),
        figure(NOT_MEASURED if queue == [None, None] else " / ".join(count(value) for value in queue)),
        figure(percent(level.peak_kv_usage, 0)),
        figure(count(level.preemptions)),
        figure(percent(level.prefix_cache_hit_rate)),
    ]
