"""The report as one self-contained HTML page: inline style, inline SVG, no script, nothing loaded from outside."""

from __future__ import annotations

from pathlib import Path

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import headline, warnings
from pipeline.report.sections import build_sections

TEMPLATES = Path(__file__).parent / "templates"
DECISION_SIGNS = {"GO": "✓", "NO-GO": "✕", "INCONCLUSIVE": "?"}


def render_html(bundle: ResultBundle) -> str:
    """The whole page; the same results give the same bytes."""
    import jinja2
    from markupsafe import Markup

    from pipeline.report.plots import plots_of, styles

    style = styles(bundle)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sections = [
        (section, [(plot, Markup(plot.svg)) for plot in plots_of(bundle, section.key)])
        for section in build_sections(bundle)
    ]
    page: str = environment.get_template("report.html.j2").render(
        bundle=bundle,
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        headline=f"{headline(bundle.verdict)}.",
        warnings=warnings(bundle),
        sections=sections,
        legend=[(name, style.sign(name), style.variable(name)) for name in bundle.variants],
        signs=DECISION_SIGNS,
    )
    return page
