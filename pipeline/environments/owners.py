"""Files that two packages of one environment both claim, with different content: the one that was installed last has won.

Standard library only.
"""

from __future__ import annotations

import csv
from pathlib import Path

STRAY = {
    "build_backend.py": "flashinfer-python 0.7.0.post1 and torch-c-dlpack-ext 0.1.5 packed the script that built them; nothing imports it"
}
"""File -> why it doesn't matter who wins."""


def clashes(environment: Path) -> dict[str, tuple[str, ...]]:
    """File below site-packages -> the distributions (`name-version`) whose records disagree about what is in it.

    Packages that were cut out of one share files (mlflow and mlflow-skinny): with one content that is harmless, and not listed.
    """
    owners: dict[str, dict[str, str]] = {}
    for record in (environment / "lib").glob("python3.*/site-packages/*.dist-info/RECORD"):
        distribution = record.parent.name.removesuffix(".dist-info")
        with record.open(encoding="utf-8", newline="") as file:
            for row in filter(None, csv.reader(file)):
                if row[1] and row[0] not in STRAY:  # compiled bytecode has no hash: its source has
                    owners.setdefault(row[0], {})[distribution] = row[1]
    return {
        path: tuple(sorted(found)) for path, found in sorted(owners.items()) if len(set(found.values())) > 1
    }


def describe(found: dict[str, tuple[str, ...]]) -> str:
    """One clause: how many files, whose, and one of them."""
    path, distributions = next(iter(found.items()))
    return f"{' and '.join(distributions)} both bring {len(found)} files, for example {path}"
