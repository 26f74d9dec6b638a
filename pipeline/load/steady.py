"""Ramp, steady window and drain of one cell, told apart by its records alone.

Closed loop at concurrency C: every end of a request is the start of another, so exactly C are in flight from the moment
that the last of the first C was sent until the last request of all was sent. The first C started together, though, and
their prefills stood in each other's way as no later ones do; the ramp therefore lasts until each of the first C has ended
and so handed its place over. The drain begins when the last request is sent: from then on fewer and fewer are in flight.

Open loop: nothing holds the number in flight, it climbs from zero to (rate x latency). The ramp lasts one E2EL, the 90th
percentile of those seen; the drain begins at the last scheduled arrival.

Warm-up requests are part of the cell and run straight into the measured ones, so nothing drains between the two. A window
counts as steady only if it's at least as long as the median E2EL: a shorter one holds no request from start to end, and its
throughput is that of an accident. Throughput counts each token at the moment it arrived, prompt tokens at the first token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.load.records import RequestRecord

RAMP_PERCENTILE = 0.9


@dataclass(frozen=True)
class Phases:
    """Four moments on the records' clock, ascending: ramp [start, ramp_end), steady [ramp_end, drain_start), drain to end."""

    start_s: float
    ramp_end_s: float
    drain_start_s: float
    end_s: float

    @property
    def steady_s(self) -> float:
        return self.drain_start_s - self.ramp_end_s


def phases(records: Sequence[RequestRecord]) -> tuple[Phases | None, str]:
    """The cell's phases, or None and why it has no steady window. `records` are all of one cell's, warm-up included."""
    ordered = sorted(records, key=lambda record: record.origin_s)
    completed = [record for record in ordered if record.completed]
    if not completed:
        return None, "no request completed"
    start_s, end_s = ordered[0].origin_s, max(record.end_s for record in ordered)
    typical_s = _rank([record.end_s - record.origin_s for record in completed], 0.5)
    level = ordered[0].level
    if level is not None:
        if len(ordered) <= 2 * level:
            return None, f"{len(ordered)} requests on {level} streams: more than {2 * level} are needed"
        ramp_end_s = max(record.end_s for record in ordered[:level])
    else:
        ramp_end_s = start_s + _rank(
            [record.end_s - record.origin_s for record in completed], RAMP_PERCENTILE
        )
    drain_start_s = ordered[-1].origin_s
    if drain_start_s - ramp_end_s < typical_s:
        length = max(0.0, drain_start_s - ramp_end_s)
        return None, f"{length:.1f} s between ramp and drain are less than one request's {typical_s:.1f} s"
    return Phases(start_s, ramp_end_s, drain_start_s, end_s), ""


def tokens_within(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> tuple[int, int]:
    """(prompt, output) tokens that arrived in [begin, end), whatever became of their request afterwards."""
    inputs = outputs = 0
    for record in records:
        for index, (time_s, count) in enumerate(token_arrivals(record)):
            if begin_s <= time_s < end_s:
                outputs += count
                inputs += (record.input_tokens or 0) if index == 0 else 0
    return inputs, outputs


def token_arrivals(record: RequestRecord) -> list[tuple[float, int]]:
    """(time, tokens) of each chunk. Without the server's counts the tokens are spread evenly, the remainder at the end."""
    if record.ttft_s is None:
        return []
    first_s = record.start_s + record.ttft_s
    times = [first_s + gap for gap in itertools.accumulate(record.itls_s, initial=0.0)]
    if record.chunk_tokens:
        return list(zip(times, record.chunk_tokens, strict=True))
    share, rest = divmod(record.output_tokens or len(times), len(times))
    return [(time_s, share + (rest if index == len(times) - 1 else 0)) for index, time_s in enumerate(times)]


def _rank(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(math.ceil(round(share * len(ordered), 9)), 1) - 1]
