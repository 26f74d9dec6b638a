"""Stage `report`: the verdict and its evidence as one HTML page and as Markdown."""

from __future__ import annotations

import sys

from pipeline.files import write_text
from pipeline.report import render
from pipeline.settings import Settings
from pipeline.stages.context import RESULTS, bundle, stage_main


def run(settings: Settings, _: str) -> None:
    html, markdown = render(bundle(settings))
    write_text(RESULTS / "report.md", markdown)
    path = write_text(RESULTS / "report.html", html)
    print(f"report: {path}")


if __name__ == "__main__":
    sys.exit(stage_main(run))
