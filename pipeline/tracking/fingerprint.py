"""What tells one set of results from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pipeline.errors import UserInputError


def lock_fingerprint(profile: str, path: str | Path = "graph/dvc.lock") -> str:
    """Hex SHA-256 of what graph/dvc.lock says of one profile's stages, which are told by where their outputs are.

    The stage that tracks isn't in the file. Raises `UserInputError` when the file is missing or isn't a lock.
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
    own = f"runs/{profile}/"
    stages = {
        name: entry
        for name, entry in content["stages"].items()
        if any(str(out.get("path", "")).startswith(own) for out in entry.get("outs", []))
    }
    if not stages:
        raise UserInputError(f"{target}: no stage of the profile {profile} in it; `dvc repro` runs them")
    return hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()
