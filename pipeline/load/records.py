"""One record per request, the source of every published load figure, and its Parquet file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError

FORMAT = "quantgate-requests-1"


@dataclass(frozen=True)
class RequestRecord:
    """What one request did. Times in seconds; `start_s` is CLOCK_MONOTONIC, the clock of the metrics timeline."""

    level: int
    """Concurrency of the cell."""
    index: int
    """Position in the cell; the same index is the same prompt in every variant."""
    start_s: float
    """When the request was sent, after any wait for a free stream of the client."""
    ttft_s: float | None
    """Start to first streamed chunk; None when none came."""
    itls_s: tuple[float, ...]
    """Gaps between successive chunks. A chunk usually carries one token; under load the server may join several."""
    latency_s: float | None
    """Start to last chunk; for a failed request start to failure."""
    input_tokens: int | None
    """As the server counted them; None for a failed request."""
    output_tokens: int | None
    """As the server counted them; None for a failed request."""
    requested_output_tokens: int
    """What was asked for: the gaps of a failed request that never came are known from it."""
    error: str | None
    """Why it failed, one line; None when it completed."""

    @property
    def completed(self) -> bool:
        return self.error is None


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
    return [RequestRecord(**{**row, "itls_s": tuple(row["itls_s"])}) for row in rows]


def _types(pa: Any) -> dict[str, Any]:
    """Column name -> Arrow type, in the order of the fields."""
    by_annotation = {
        "int": pa.int64(),
        "int | None": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "str | None": pa.string(),
        "tuple[float, ...]": pa.list_(pa.float64()),
    }
    return {field.name: by_annotation[str(field.type)] for field in fields(RequestRecord)}
