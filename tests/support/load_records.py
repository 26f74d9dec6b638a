"""Synthetic request records whose truth is known by construction."""

from __future__ import annotations

import dataclasses

from pipeline.load.metrics import Limits, summarise
from pipeline.load.records import RequestRecord
from pipeline.results import LoadLevel


def record(
    index: int,
    start_s: float,
    ttft_s: float,
    gap_s: float,
    *,
    tokens: int = 5,
    level: int | None = 2,
    cell: str = "level-2",
    warmup: bool = False,
    scheduled_s: float | None = None,
) -> RequestRecord:
    """A request of even gaps, one token a chunk."""
    gaps = (gap_s,) * (tokens - 1)
    return RequestRecord(
        cell=cell,
        level=level,
        index=index,
        warmup=warmup,
        scheduled_s=scheduled_s,
        start_s=start_s,
        ttft_s=ttft_s,
        itls_s=gaps,
        chunk_tokens=(1,) * tokens,
        latency_s=ttft_s + sum(gaps),
        input_tokens=100,
        output_tokens=tokens,
        requested_output_tokens=tokens,
        error=None,
    )


def failed(source: RequestRecord, gaps_seen: int = 0, after_s: float = 1.0) -> RequestRecord:
    """The same request, broken off."""
    return dataclasses.replace(
        source,
        ttft_s=source.ttft_s if gaps_seen else None,
        itls_s=source.itls_s[:gaps_seen],
        chunk_tokens=source.chunk_tokens[: gaps_seen + 1] if gaps_seen else (),
        latency_s=after_s,
        input_tokens=None,
        output_tokens=None,
        error="ClientPayloadError: cut",
    )


def closed_loop(
    level: int, count: int, ttft_s: float, gap_s: float, *, tokens: int = 5
) -> list[RequestRecord]:
    """`count` equal requests on `level` streams whose starts are spread evenly over one service time.

    Exactly `level` are in flight between the ramp and the drain, each stream sending its next at the end of its last.
    """
    service_s = ttft_s + (tokens - 1) * gap_s
    return [
        record(
            index,
            index // level * service_s + index % level * service_s / level,
            ttft_s,
            gap_s,
            tokens=tokens,
            level=level,
            cell=f"level-{level}",
        )
        for index in range(count)
    ]


def level_cell(
    level: int, measured: int, over: int, cpu: float = 0.1, *, repeat: int = 1, gap_s: float = 0.01
) -> tuple[list[RequestRecord], LoadLevel]:
    """A level's cell: one warm-up request per stream and `measured` ones, of which the last `over` have gaps of 100 ms."""
    name = f"level-{level}-repeat-{repeat}"
    records = [
        dataclasses.replace(
            record(index, float(index), 0.1, 0.1 if index >= level + measured - over else gap_s, level=level),
            cell=name,
            warmup=index < level,
        )
        for index in range(level + measured)
    ]
    return records, summarise(records, [], Limits(1000, 50), repeat=repeat, client_cpu_share=cpu)
