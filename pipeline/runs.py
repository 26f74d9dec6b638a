"""Where a profile's files stand: runs/<profile>/, which `results` and `artifacts/weights` point at.

DVC tracks the real folders, one for each profile with its stages, so that a stage can't read another profile's results. Code
and people read `results/`: the profile that ran last.
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
    for folder in (runs / "weights", runs / "quantize"):  # a profile without quantizers has an empty one
        folder.mkdir(parents=True, exist_ok=True)
    link(root / "results", runs)
    link(root / "artifacts/weights", runs / "weights")


def link(place: Path, target: Path) -> None:
    """Make `place` a relative link to `target`, at once. `UserInputError` where anything but a link stands there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    words = os.path.relpath(target, place.parent)
    if place.is_symlink():
        if os.readlink(place) == words:
            return
    elif place.exists():
        raise UserInputError(f"{place} is in the way: it must be a link to {words}; move it aside")
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(words)
    os.replace(temporary, place)
