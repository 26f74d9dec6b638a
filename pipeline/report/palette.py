"""Colours of the plots, as CSS variables, so that one drawing serves light, dark and print.

matplotlib draws with placeholder colours, and `as_variables` turns them into `var(--…)`. Series also differ by
marker, so that no plot depends on colour alone.
"""

from __future__ import annotations

import re

INK, MUTED, GRID, SURFACE, LIMIT, BAND = (f"#0a0a0{digit}" for digit in "123456")
SERIES = tuple(f"#0b0b0{digit}" for digit in "12345678")
CONTROL = "#0b0b09"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
MARKER_SIGNS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "⬟")
CONTROL_MARKER, CONTROL_SIGN = "x", "×"

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    LIMIT: "--limit",
    BAND: "--band",
    CONTROL: "--control",
    **{colour: f"--series-{index}" for index, colour in enumerate(SERIES, start=1)},
}


class Styles:
    """One colour and marker per variant, by order; the A/A control is grey, it is a noise floor and no contender."""

    def __init__(self, variants: list[str], control: str | None) -> None:
        self._control = control
        self._slots = {name: slot for slot, name in enumerate(name for name in variants if name != control)}

    def colour(self, variant: str) -> str:
        return CONTROL if variant == self._control else SERIES[self._slots[variant] % len(SERIES)]

    def marker(self, variant: str) -> str:
        return CONTROL_MARKER if variant == self._control else MARKERS[self._slots[variant] % len(MARKERS)]

    def sign(self, variant: str) -> str:
        """The marker as a character, for the legend."""
        return CONTROL_SIGN if variant == self._control else MARKER_SIGNS[self._slots[variant] % len(MARKERS)]

    def variable(self, variant: str) -> str:
        """The CSS variable of the variant's colour."""
        return _VARIABLES[self.colour(variant)]


def as_variables(svg: str) -> str:
    """Replace every placeholder colour by its CSS variable."""
    return re.sub(r"#0[ab]0[ab]0[0-9]", lambda match: f"var({_VARIABLES[match.group()]})", svg)
