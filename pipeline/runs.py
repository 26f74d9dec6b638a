"""Where a profile's files stand: runs/<profile>/, which `results` and `artifacts/weights` point at.

DVC tracks the real folders, one for each profile, so that a stage can't read another profile's results. Code and people read
`results/`: the profile that ran last.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import UserInputError

RUNS = Path("runs")


def point_at(profile: str, root: Path | None = None) -> None:
    """Make `results` and `artifacts/weights` the profile's. `UserInputError` where something else stands in their place."""
    root = root or Path()
    runs = root / RUNS / profile
    for folder in (runs, runs / "weights"):
        folder.mkdir(parents=True, exist_ok=True)
    _link(root / "results", runs)
    _link(root / "artifacts/weights", runs / "weights")


def _link(link: Path, folder: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(folder, link.parent)
    if link.is_symlink():
        if os.readlink(link) == target:
            return
    elif link.exists():
        raise UserInputError(
            f"{link} is in the way: it must be a link into {RUNS}/; move it aside (an older version kept one profile's files there)"
        )
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
