"""The report as GitHub-flavoured Markdown: the same facts as the page, without the plots."""

from __future__ import annotations

import re

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import headline, warnings
from pipeline.report.sections import Section, build_sections
from pipeline.report.table import Cell, Table

DECISION_SIGNS = {"GO": "✅ GO", "NO-GO": "❌ NO-GO", "INCONCLUSIVE": "❔ INCONCLUSIVE"}


def render_markdown(bundle: ResultBundle) -> str:
    """The whole report; ends with one newline."""
    lines = [f"# {escape(headline(bundle.verdict))}", ""]
    lines += [
        f"Profile {escape(bundle.verdict.profile)}, model {escape(bundle.plan.model)}, device {escape(bundle.plan.device)}.",
        "",
    ]
    for title, text in warnings(bundle):
        lines += [f"> **{escape(title)}.** {escape(text)}", ""]
    for section in build_sections(bundle):
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {escape(section.title)}", ""]
    for paragraph in section.intro:
        lines += [escape(paragraph), ""]
    for table in section.tables:
        lines += [f"### {escape(table.caption)}", "", *_table(table), ""]
    if section.definitions:
        lines += [f"- **{escape(word)}**: {escape(meaning)}" for word, meaning in section.definitions]
        lines.append("")
    return lines


def _table(table: Table) -> list[str]:
    if not table.rows:
        return ["Nothing was recorded."]
    head = [escape(column.title) for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    body = [[_cell(cell) for cell in row] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in [head, rule, *body]]


def _cell(cell: Cell) -> str:
    text = DECISION_SIGNS.get(cell.text, escape(cell.text)) if cell.kind == "decision" else escape(cell.text)
    if cell.kind == "missing":
        text = f"_{text}_"
    notes = "".join(f"<br>{escape(line)}" for line in cell.note.splitlines())
    tags = "".join(f" ({escape(tag)})" for tag in cell.tags)
    return f"{text}{tags}{notes}"


def escape(text: str) -> str:
    """Text on one line that Markdown shows as it is: no markup, no cell border, no tag, no link."""
    line = re.sub(r"\s+", " ", text).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*|~#])", r"\\\1", line)
    line = line.replace("](", "]\\(")
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)
