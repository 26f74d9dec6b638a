"""When a level has been repeated often enough: its intervals are narrow, and its requests leave nothing of the SLO open.

Stopping early must not make a verdict of what would have been none. Intervals need three repeats, so no fewer are run. The
latency gates judge all requests of a level once, at the SLO's error; a look at them after each repeat is a second chance to
err, so it is taken at a tenth of that error, by the line of the search's probes, which holds over all looks. At so small an
error a level can be shown to break the limits long before the last repeat, and hardly to meet them: one that could pass with
all of its repeats gets all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.load.bounds import requests_needed
from pipeline.load.compare import MIN_REPEATS, estimate
from pipeline.load.judge import boundary
from pipeline.load.metrics import PERCENTILES, tpot_s, ttft_s
from pipeline.load.records import RequestRecord
from pipeline.load.slo import Slo
from pipeline.results import LoadLevel

ERROR_SHARE = 0.1
"""Of the SLO's error, for the looks between repeats."""


def is_settled(
    done: Sequence[LoadLevel], records: Sequence[RequestRecord], narrow: float, slo: Slo, planned: int
) -> bool:
    """Whether a level's next repeat may be left out.

    `done`: its repeats so far; `records`: those of any cells; `narrow`: relative half-width that its intervals may have;
    `planned`: its measured requests over all repeats.
    """
    if len(done) < MIN_REPEATS or not _are_narrow(done, narrow):
        return False
    if planned < requests_needed(slo.percentile, 0, slo.confidence):
        return True  # no number of repeats that is planned could show that it meets the SLO
    return _breaks_limits(done, records, slo, planned)


def _are_narrow(done: Sequence[LoadLevel], narrow: float) -> bool:
    """Throughput, and every percentile of TTFT and TPOT that each repeat has requests enough for; none of them may drift."""
    for values in _figures(done):
        known = [value for value in values if value is not None]
        if len(known) < len(done):
            continue
        found = estimate(known)
        assert found.interval is not None
        low, high = found.interval
        if found.drifts or (high - low) / 2 > narrow * found.value:
            return False
    return True


def _figures(done: Sequence[LoadLevel]) -> list[list[float | None]]:
    """The figures that people compare, one value per repeat each."""
    found: list[list[float | None]] = [[level.output_throughput_tok_s for level in done]]
    for share in PERCENTILES:
        name = f"p{share * 100:.0f}_ms"
        found.append([getattr(level.ttft, name) for level in done])
        found.append([getattr(level.tpot, name) for level in done])
    return found


def _breaks_limits(
    done: Sequence[LoadLevel], records: Sequence[RequestRecord], slo: Slo, planned: int
) -> bool:
    """Whether so many requests were over a limit that the rest of the repeats can't mend it."""
    cells = {level.cell for level in done}
    line = boundary(slo.percentile, 1 - ERROR_SHARE * (1 - slo.confidence), planned, needs_pass=False)
    over_ttft = over_tpot = n = 0
    for record in records:
        if record.cell not in cells or record.warmup or record.outcome == "stopped":
            continue
        n += 1
        over_ttft += ttft_s(record) * 1e3 > slo.limits.ttft_ms
        over_tpot += tpot_s(record) * 1e3 > slo.limits.tpot_ms
        if n <= planned and max(over_ttft, over_tpot) >= line.fail_at[n]:
            return True
    return False
