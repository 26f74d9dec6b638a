"""The report: one HTML page, one Markdown file and one terminal table from the same results.

`render` is for the person who decides, `verdict_table` for the one at the terminal. The numbers come from
`pipeline.results` as the stages wrote them; nothing is computed here but how they are shown.
"""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle, load_bundle
from pipeline.report.markdown import render_markdown
from pipeline.report.page import render_html
from pipeline.report.terminal import verdict_table


def render(bundle: ResultBundle) -> tuple[str, str]:
    """(HTML page, Markdown). The same bundle gives the same bytes: there is no clock and no randomness in it."""
    return render_html(bundle), render_markdown(bundle)


__all__ = ["ResultBundle", "load_bundle", "render", "verdict_table"]
