"""One record per request, the source of every published load figure, and its Parquet file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UserInputError

FORMAT = "quantgate-requests-2"

Outcome = Literal["completed", "failed", "stopped"]


@dataclass(frozen=True)
class RequestRecord:
    """What one request did. Times in seconds; absolute ones are CLOCK_MONOTONIC, the clock of the metrics timeline."""

    cell: str
    """Name of the cell, unique within a variant's run."""
    level: int | None
    """Concurrency of the cell; None in an open loop, where the server decides it."""
    index: int
    """Position in the cell, in the order of sending; the same index is the same prompt in every variant."""
    warmup: bool
    """Sent only to bring the cell to its load: kept, and left out of every latency figure."""
    scheduled_s: float | None
    """When an open loop meant to send it; None in a closed loop."""
    start_s: float
    """When the request was sent, after any wait for a free stream of the client."""
    ttft_s: float | None
    """Send to the first chunk that carries a token; None when none came."""
    itls_s: tuple[float, ...]
    """Gaps between successive chunks that carry tokens. Under load the server may join several tokens in one."""
    chunk_tokens: tuple[int, ...]
    """Tokens in each of those chunks, the first included, as the server counted them; empty where it didn't say."""
    latency_s: float | None
    """Send to last chunk; for a failed or stopped request send to its end."""
    input_tokens: int | None
    """As the server counted them; None unless it completed."""
    output_tokens: int | None
    """As the server counted them; None unless it completed."""
    requested_output_tokens: int
    """What was asked for: the gaps of a failed request that never came are known from it."""
    error: str | None
    """Why it failed, one line; None when it didn't."""
    stopped: bool = False
    """Ended by us, because its cell was decided: no failure of the server's, and no latency either."""

    @property
    def outcome(self) -> Outcome:
        """Every request is exactly one of the three."""
        if self.stopped:
            return "stopped"
        return "completed" if self.error is None else "failed"

    @property
    def completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"

    @property
    def origin_s(self) -> float:
        """Where its latency is counted from: the scheduled arrival in an open loop, else the moment of sending."""
        return self.start_s if self.scheduled_s is None else self.scheduled_s

    @property
    def end_s(self) -> float:
        """When it ended, however it ended."""
        return self.start_s + (self.latency_s or 0.0)


def write_records(path: str | Path, records: Sequence[RequestRecord]) -> Path:
    """Write all records of a variant, atomically. One row per request, columns named as the fields."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: [getattr(record, name) for record in records] for name in _types(pa)}
    schema = pa.schema(list(_types(pa).items()), metadata={"format": FORMAT})
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    try:
        pq.write_table(pa.table(columns, schema=schema), temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def read_records(path: str | Path) -> list[RequestRecord]:
    """Read them back; `UserInputError` names a file that is missing, damaged or of another version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserInputError(f"{path}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UserInputError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    if (table.schema.metadata or {}).get(b"format") != FORMAT.encode():
        raise UserInputError(
            f"{path}: it wasn't written by this version, run `dvc repro --force` for its stage"
        )
    rows = table.to_pylist()
    lists = ("itls_s", "chunk_tokens")
    return [RequestRecord(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in rows]


def _types(pa: Any) -> dict[str, Any]:
    """Column name -> Arrow type, in the order of the fields."""
    by_annotation = {
        "int": pa.int64(),
        "bool": pa.bool_(),
        "str": pa.string(),
        "int | None": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "str | None": pa.string(),
        "tuple[float, ...]": pa.list_(pa.float64()),
        "tuple[int, ...]": pa.list_(pa.int64()),
    }
    return {field.name: by_annotation[str(field.type)] for field in fields(RequestRecord)}
