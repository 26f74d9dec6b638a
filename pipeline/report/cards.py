"""What the cards did while a variant was measured: one table, and what must be said before any number."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.bundle import ResultBundle
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import NOT_MEASURED, listing, mebibytes, number, percent
from pipeline.results import GpuLoad, GpuMemory

CHANGE_LIMIT_BYTES = 64 * 1024**2
"""What others may take or give back while an engine starts: less than the smallest overhead of a 7B on an RTX 4090, 0.07 GiB of
the sampler's state (`quantgate plan`)."""


def cards_table(bundle: ResultBundle) -> Table | None:
    """One row per variant and card; None where nothing ran on a card."""
    rows = [_row(variant, load, memory) for variant, load, memory in _cards(bundle)]
    if not rows:
        return None
    columns = [
        Column("Variant"),
        Column("Card"),
        Column("SM clock, MHz", "mean, lowest to highest below it; while requests ran", numeric=True),
        Column("Hottest, °C", numeric=True),
        Column("Power, W", "mean, highest and limit below it", numeric=True),
        Column("Utilization", "share of the time in which a kernel ran", numeric=True),
        Column("At power limit", "share of the readings; usual under full load", numeric=True),
        Column("Slowed down", "by heat or an emergency brake, share of the readings"),
        Column("Held by others", "before the engine started"),
        Column("Changed at the start", "what others' processes took more, or gave back", numeric=True),
    ]
    return Table("Cards under load", columns, rows)


def card_warnings(bundle: ResultBundle) -> Iterator[tuple[str, str]]:
    """(title, text): a card that was slowed down, memory that others moved while an engine measured what is free."""
    slowed, moved = [], []
    for variant, load, memory in _cards(bundle):
        if load is not None and (reasons := _slowed(load)):
            slowed.append(f"{variant} ({load.name}: {reasons})")
        if memory is not None and is_changed(memory):
            moved.append(f"{variant} ({_signed(memory.changed_bytes)} by {_others(memory)})")
    if slowed:
        yield (
            "The card was slowed down",
            f"While these ran it took its clocks down: {listing(slowed)}. Their speed and latency are those of a hot or braked "
            "card; cool it and run `dvc repro --force` for their stages.",
        )
    if moved:
        yield (
            "Others moved memory on the card",
            f"Between the engine's start and its readiness other processes took memory or gave it back: {listing(moved)}. "
            "The engine sizes its KV pool in that time, so its capacity may be off; keep the card to the engine.",
        )


def is_changed(memory: GpuMemory) -> bool:
    return memory.changed_bytes is not None and abs(memory.changed_bytes) > CHANGE_LIMIT_BYTES


def is_slowed(load: GpuLoad) -> bool:
    return any((load.slowed or {}).values())


def _cards(bundle: ResultBundle) -> Iterator[tuple[str, GpuLoad | None, GpuMemory | None]]:
    for variant in bundle.variants:
        origin = bundle.verdict.variants[variant].provenance
        if origin is None:
            continue
        loads = {load.uuid: load for load in origin.gpu_load or []}
        memories = {memory.uuid: memory for memory in origin.gpu_memory or []}
        for uuid in dict.fromkeys([*loads, *memories]):
            yield variant, loads.get(uuid), memories.get(uuid)


def _row(variant: str, load: GpuLoad | None, memory: GpuMemory | None) -> list[Cell]:
    card = (load or memory).name  # type: ignore[union-attr]  one of them is there
    held = words(None)
    if memory is not None:
        held = words(mebibytes(memory.held_before_bytes), note=_others(memory))
    return [
        name(variant),
        words(card),
        *(_load_cells(load) if load else [words(None)] * 6),
        held,
        figure(NOT_MEASURED if memory is None else _signed(memory.changed_bytes)),
    ]


def _load_cells(load: GpuLoad) -> list[Cell]:
    clock = load.sm_clock_mhz
    limits = f"{number(load.power_max_w, 0)} of {number(load.power_limit_w, 0)}"
    return [
        figure(number(clock[1] if clock else None, 0), f"{clock[0]:,} to {clock[2]:,}" if clock else ""),
        figure(number(load.temperature_max_c, 0)),
        figure(number(load.power_mean_w, 0), limits),
        figure(percent(load.utilization_mean)),
        figure(percent(load.power_capped)),
        words(None if load.slowed is None else _slowed(load) or "no"),
    ]


def _slowed(load: GpuLoad) -> str:
    return ", ".join(f"{reason} {percent(share)}" for reason, share in (load.slowed or {}).items() if share)


def _others(memory: GpuMemory) -> str:
    listed = memory.others_before + [p for p in memory.others_after or [] if p not in memory.others_before]
    names = list(dict.fromkeys(process.name or f"pid {process.pid}" for process in listed))
    return ", ".join(names) or "no process that the driver names"


def _signed(value: int | None) -> str:
    if value is None:
        return NOT_MEASURED
    return "none" if value == 0 else f"{'+' if value > 0 else '−'}{mebibytes(abs(value))}"
