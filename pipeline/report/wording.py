"""How numbers become text: one way each, and a missing number is always said in words.

A figure that was not measured must never look like a small one, so every function takes `None` and answers
`NOT_MEASURED`. Differences carry their sign; the minus sign is the typographic one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NOT_MEASURED = "not measured"
MINUS = "\u2212"


def _signs(text: str) -> str:
    return text.replace("-", MINUS)


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return NOT_MEASURED if value is None else _signs(f"{value:,.0f}")


def number(value: float | None, digits: int = 2) -> str:
    """A plain number with `digits` decimals."""
    return NOT_MEASURED if value is None else _signs(f"{value:,.{digits}f}")


def latency(value_ms: float | None) -> str:
    """Milliseconds without the unit: one decimal below 100, none above."""
    if value_ms is None:
        return NOT_MEASURED
    return f"{value_ms:,.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def speed(value: float | None) -> str:
    """Tokens per second without the unit."""
    return NOT_MEASURED if value is None else f"{value:,.1f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 1 as percent."""
    return NOT_MEASURED if share is None else f"{100 * share:.{digits}f}\u00a0%"


def points(share: float | None) -> str:
    """A difference of shares in percentage points, signed; a difference that rounds to zero has no sign."""
    if share is None:
        return NOT_MEASURED
    text = f"{100 * share:+.1f}"
    return _signs("0.0" if text in ("+0.0", "-0.0") else text)


def points_interval(ends: Sequence[float | None] | None) -> str:
    """`[low, high]` in percentage points."""
    if ends is None or any(end is None for end in ends):
        return NOT_MEASURED
    return f"[{', '.join(points(end) for end in ends)}]"


def percent_interval(ends: Sequence[float] | None) -> str:
    """`[low, high]` of a share, in percent without the unit."""
    return NOT_MEASURED if ends is None else f"[{', '.join(f'{100 * end:.1f}' for end in ends)}]"


def probability(value: float | None) -> str:
    """A p-value; tiny ones as a bound."""
    if value is None:
        return NOT_MEASURED
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def mebibytes(value: int | None) -> str:
    """Bytes in MiB (1024^2) or, from 1 GiB on, in GiB (1024^3), with the unit."""
    if value is None:
        return NOT_MEASURED
    if value >= 1024**3:
        return f"{value / 1024**3:,.2f} GiB"
    return f"{value / 1024**2:,.1f} MiB"


def seconds(value: float | None) -> str:
    """Seconds with the unit."""
    return NOT_MEASURED if value is None else f"{value:,.0f} s"


def sentence(text: str) -> str:
    """One line, first letter upper-case, one full stop at the end."""
    line = re.sub(r"\s+", " ", text).strip().rstrip(".")
    return f"{line[:1].upper()}{line[1:]}." if line else ""


def listing(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def gate_number(value: float | None, unit: str) -> str:
    """A gate's value or limit with its unit; accuracies are shown in points, shares in percent."""
    if value is None:
        return NOT_MEASURED
    if unit == "accuracy":
        return f"{points(value)} pt"
    if unit.startswith("share"):
        return percent(value)
    if unit == "ms":
        return f"{latency(value)} ms"
    text = count(value) if float(value).is_integer() else number(value, 2)
    return f"{text} {unit}".strip()
