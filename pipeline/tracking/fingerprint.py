"""What tells one set of results from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pipeline.errors import UserInputError


def lock_fingerprint(path: str | Path) -> str:
    """Hex SHA-256 of what a profile's dvc.lock says of its stages. The stage that tracks isn't among them.

    Raises `UserInputError` when the file is missing or isn't a lock.
    """
    import yaml

    target = Path(path)
    try:
        content = yaml.safe_load(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserInputError(f"{target}: no such file; `dvc repro` writes it") from None
    except yaml.YAMLError:
        raise UserInputError(f"{target}: not valid YAML") from None
    if not isinstance(content, dict) or not isinstance(content.get("stages"), dict):
        raise UserInputError(f"{target}: no key `stages`; it isn't a DVC lock file")
    return hashlib.sha256(json.dumps(content["stages"], sort_keys=True).encode()).hexdigest()
