"""Answers of scoring requests kept while a run isn't finished, so that a killed run goes on where it was.

lm-eval's own cache is keyed by the request, and hands the quantized variant the reference's answers when both use one path
(lm-evaluation-harness issue 4063). Here the file itself belongs to one identity: variant, checkpoint, engine and everything
that the engine was told; another identity is another file, and a file that was put under a wrong name is refused.
A finished run's file is removed: a forced rerun measures again instead of repeating what it remembers.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentUnfitError


class RequestCache:
    """Request body -> answer, for one identity. Safe to use from several threads."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """`identity` is everything that decides an answer besides the request, as plain JSON values."""
        self.identity = _digest(identity)
        self.path = folder / f"{self.identity}.sqlite"
        self.hits = 0
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._database = self._open()
        except sqlite3.DatabaseError:  # cut or foreign: what it held is only worth the time
            self.path.unlink(missing_ok=True)
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("CREATE TABLE IF NOT EXISTS owner (identity TEXT PRIMARY KEY)")
        database.execute(
            "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"
        )
        database.execute(
            "INSERT INTO owner SELECT ? WHERE NOT EXISTS (SELECT 1 FROM owner)", (self.identity,)
        )
        owners = [row[0] for row in database.execute("SELECT identity FROM owner")]
        if owners != [self.identity]:
            database.close()
            raise EnvironmentUnfitError(
                f"{self.path}: holds another variant's answers than its name says; remove it"
            )
        return database

    def get(self, request: Mapping[str, Any]) -> Any | None:
        """The kept answer, or None."""
        with self._lock:
            row = self._database.execute(
                "SELECT answer FROM answers WHERE request = ?", (_digest(request),)
            ).fetchone()
        if row is None:
            return None
        self.hits += 1
        return json.loads(row[0])

    def put(self, request: Mapping[str, Any], answer: Any) -> None:
        """Keep a checked answer. One that is no score must not get here: a rerun would believe it."""
        with self._lock:
            self._database.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (_digest(request), json.dumps(answer))
            )

    def close(self, finished: bool) -> None:
        """Release the file; `finished` removes it."""
        self._database.close()
        if finished:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
