"""This tree as a clone would have it, for tests that run the pipeline somewhere else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(target: Path, *, without: str | None = None) -> Path:
    """Copy what git tracks, or would, into `target`; nothing of the folder `without`. Returns `target`."""
    # The checkout may belong to another user than runs this, as in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not (without and name.startswith(f"{without}/")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target
