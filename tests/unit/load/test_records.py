"""The Parquet file of request records: what goes in comes out, and a bad file is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UserInputError
from pipeline.load.records import RequestRecord, read_records, write_records

RECORDS = [
    RequestRecord(
        "level-4",
        4,
        0,
        True,
        None,
        1234.5,
        0.25,
        (0.1, 0.2, 0.30000000000000004),
        (1, 1, 1, 1),
        0.85,
        448,
        4,
        4,
        None,
    ),
    RequestRecord("level-4", 4, 1, False, None, 1234.6, None, (), (), 2.0, None, None, 4, "Bad Gateway"),
    RequestRecord(
        "open-1", None, 0, False, 1239.5, 1240.0, 0.25, (), (1,), None, None, None, 2, None, stopped=True
    ),
]


def test_every_request_has_one_outcome() -> None:
    assert [record.outcome for record in RECORDS] == ["completed", "failed", "stopped"]
    assert [record.completed for record in RECORDS] == [True, False, False]
    assert [record.failed for record in RECORDS] == [False, True, False]
    assert [record.origin_s for record in RECORDS] == [1234.5, 1234.6, 1239.5]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = write_records(tmp_path / "measure" / "awq.requests.parquet", RECORDS)
    assert read_records(path) == RECORDS
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file left


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "awq.requests.parquet", RECORDS)

    def cut(table: pa.Table, where: str) -> None:
        Path(where).write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", cut)
    with pytest.raises(KeyboardInterrupt):
        write_records(path, RECORDS[:1])
    assert read_records(path) == RECORDS
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_bad_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.parquet"
    with pytest.raises(UserInputError, match=r"missing\.parquet: no such file"):
        read_records(missing)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(write_records(tmp_path / "whole.parquet", RECORDS).read_bytes()[:200])
    with pytest.raises(UserInputError, match=r"torn\.parquet: not a readable Parquet file"):
        read_records(torn)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"level": [4]}), other)
    with pytest.raises(UserInputError, match=r"other\.parquet: it wasn't written by this version"):
        read_records(other)
