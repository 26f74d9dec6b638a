"""Reading and writing result files: whole or not at all.

Every write goes to a temporary name beside the target and is renamed into place, so a killed process or a
full disk never leaves a file that a later stage could take for a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError


def cache_folder(*parts: str) -> Path:
    """A folder below the user's cache folder for this project: `$XDG_CACHE_HOME/quantgate`, else `~/.cache/quantgate`.

    Links are followed: one to a scratch disk's folder that was purged can't be made a folder, where it leads can.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantgate"
    return cache.joinpath(*parts).resolve()


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, atomically; parent folders are made."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write `content` atomically; parent folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they aren't JSON."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; a missing or malformed one is a `UserInputError` that names it."""
    target = Path(path)
    try:
        return json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserInputError(f"{target}: no such file") from None
    except json.JSONDecodeError as error:
        raise UserInputError(f"{target}, line {error.lineno}: not valid JSON ({error.msg})") from None


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of one file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
