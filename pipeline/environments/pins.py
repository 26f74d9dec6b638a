"""Reading locks: one `name==version` a package, and after it the hashes of its files, of which one must be what is installed.

Standard library only.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Pin(NamedTuple):
    """One package of a lock; `hashes` are those of all files of that version, `marker` says where it is wanted."""

    name: str
    version: str
    hashes: tuple[str, ...]
    marker: str = ""

    @property
    def requirement(self) -> str:
        """The line to install it by. `==2.13.0` also lets a local 2.13.0+cpu in, which is preferred where a folder of wheels
        offers one. `===` is that version and no other (PEP 440)."""
        wanted = f"{self.name}==={self.version}" + f" ; {self.marker}" * bool(self.marker)
        return " ".join([wanted, *(f"--hash={found}" for found in self.hashes)])


def read_pins(text: str) -> list[Pin]:
    """The packages of a lock's text, in its order."""
    lines = (line.partition("#")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [_pin(line) for line in lines if line]


def versions(pins: list[Pin]) -> dict[str, str]:
    """Package -> version, names normalized (PEP 503)."""
    return {re.sub(r"[-_.]+", "-", pin.name).lower(): pin.version for pin in pins}


def _pin(line: str) -> Pin:
    package, *hashes = re.split(r"\s+--hash=", line)
    wanted, _, marker = package.partition(";")
    name, _, version = wanted.partition("==")
    return Pin(name.split("[")[0].strip(), version.strip(), tuple(hashes), marker.strip())
