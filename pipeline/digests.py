"""The digest of a folder as large as a checkpoint, computed once: every variant's stage asks for it.

What a file's content was is kept beside what told the file apart then: size, times, inode, device. The change time is among
them because nobody can set it back; a file that changed in the last moments is never taken as known, as its times may be too
coarse to show the next change (git's "racy" files).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.files import read_json, sha256_file, write_json

SETTLED_S = 2.0  # FAT's times are this coarse, all others finer


def sha256_tree(folder: str | Path, kept_path: str | Path) -> str:
    """Hex SHA-256 over the relative names and contents of all files below `folder`, in sorted order.

    `kept_path`: the JSON file that keeps the files' own digests from one call to the next.
    """
    root = Path(folder)
    kept, found = _read(kept_path), {}
    digest = hashlib.sha256()
    for path in sorted(entry for entry in root.rglob("*") if entry.is_file()):
        name = path.relative_to(root).as_posix()
        before = _identity(path)
        known = kept.get(name, {})
        sha256 = known["sha256"] if known.get("identity") == before else sha256_file(path)
        if _identity(path) == before and time.time_ns() - path.stat().st_ctime_ns > SETTLED_S * 1e9:
            found[name] = {"identity": before, "sha256": sha256}
        digest.update(name.encode() + b"\0")
        digest.update(sha256.encode() + b"\n")
    if found != kept:
        with contextlib.suppress(OSError):  # no cache, no harm
            write_json(kept_path, found)
    return digest.hexdigest()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _read(path: str | Path) -> dict[str, Any]:
    """What is kept; nothing where it isn't there or was damaged."""
    try:
        kept = read_json(path)
    except (UserInputError, OSError):
        return {}
    return kept if isinstance(kept, dict) else {}
