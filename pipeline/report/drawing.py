"""matplotlib as a source of small inline SVG: no window, no files, the same bytes every time.

The only module that sets matplotlib up. Text stays text (small, searchable, in the page's font), colours become CSS
variables, and everything that would differ between runs or reach outside the page is left out.
"""

from __future__ import annotations

import html
import io
import logging
import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.palette import GRID, INK, MUTED, as_variables

# "building the font cache" on first use is no news to anyone.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a "$" in a name is a dollar sign
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
CSS_PIXELS_PER_INCH = 96
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Plot:
    """One inline SVG with the title and the remark that go around it."""

    title: str
    svg: str
    width: int
    """CSS pixels at which the text has its natural size."""
    note: str = ""


class Canvas:
    """A figure in the making: `with Canvas(...) as canvas`, draw on `canvas.axes`, then `canvas.plot()`."""

    def __init__(
        self, key: str, title: str, *, width: float, height: float, rows: int = 1, note: str = ""
    ) -> None:
        """`key` is unique in the page and keeps the SVG's ids apart; sizes are in inches."""
        self.key, self.title, self.note = key, title, note
        self._context = mpl.rc_context({**_STYLE, "svg.hashsalt": key})
        self._size, self._rows = (width, height), rows
        self._tips: list[str] = []

    def __enter__(self) -> Canvas:
        self._context.__enter__()
        self._figure = Figure(figsize=self._size, layout="constrained")
        self.panels: list[Axes] = list(self._figure.subplots(self._rows, 1, sharex=True, squeeze=False)[:, 0])
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(None, None, None)

    @property
    def axes(self) -> Axes:
        return self.panels[0]

    def tip(self, text: str) -> str:
        """An id for `set_gid`; the element that carries it shows `text` when pointed at."""
        self._tips.append(text)
        return f"{self.key}-tip-{len(self._tips)}-"

    def plot(self) -> Plot:
        """The finished drawing."""
        buffer = io.StringIO()
        self._figure.savefig(buffer, format="svg", metadata=_NO_METADATA, transparent=True)
        width = round(self._size[0] * CSS_PIXELS_PER_INCH)
        return Plot(self.title, self._inline(buffer.getvalue()), width, self.note)

    def _inline(self, svg: str) -> str:
        """The `<svg>` element alone, fit to stand in an HTML page."""
        svg = svg[svg.index("<svg") :]
        svg = re.sub(
            r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL
        )
        svg = re.sub(r"<defs>\s*</defs>\s*", "", svg)
        svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
        named = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
        tips = {f"{self.key}-tip-{index}-" for index in range(1, len(self._tips) + 1)}
        svg = re.sub(
            r' id="([^"]*)"', lambda mark: mark.group() if mark.group(1) in named | tips else "", svg
        )
        for index, text in enumerate(self._tips, start=1):
            mark = f'<g id="{self.key}-tip-{index}-">'
            svg = svg.replace(mark, f"<g><title>{html.escape(text)}</title>", 1)
        width, height = (72 * side for side in self._size)
        label = html.escape(self.title, quote=True)
        head = f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}">'
        return as_variables(head + svg[svg.index(">") + 1 :].rstrip())
