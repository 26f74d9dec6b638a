"""The ladder on the page, in Markdown and in the terminal: the same rungs, in order, and only where there are any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.planning.rescue import ProfileOutlook, ways_of
from pipeline.planning.scenario import geometry_of
from pipeline.report import ResultBundle, render, verdict_table
from pipeline.results import Gate
from pipeline.settings import load_settings
from pipeline.verdict.ladder import with_ladders
from tests.support.sample_results import environment, sample_results

pytestmark = pytest.mark.usefixtures("without_plots")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bundle() -> ResultBundle:
    """The sample run with FP8 KV and AWQ found bad, and the demo's ladders."""
    found = sample_results()
    settings = load_settings(["profile=demo"], ROOT)
    bad = Gate(name="quality", decision="NO-GO", value=-0.2, limit=-0.05, unit="accuracy", why="-20 points")
    variants = {
        name: one.model_copy(update={"gates": [*one.gates, bad], "decision": "NO-GO"})
        if name in ("awq-fp8kv", "awq")
        else one
        for name, one in found.verdict.variants.items()
    }
    ways = {name: way for name, way in ways_of(settings).items() if name in variants}
    outlook = ProfileOutlook(settings, geometry_of(settings), environment(), {})
    verdict = found.verdict.model_copy(update={"variants": with_ladders(variants, ways, outlook)})
    return replace(found, verdict=verdict)


def test_every_rung_is_everywhere(bundle: ResultBundle) -> None:
    html, markdown = render(bundle)
    terminal = " ".join(verdict_table(bundle.verdict, bundle.plan).split())
    rungs = bundle.verdict.variants["awq-fp8kv"].rescue
    assert len(rungs) >= 3
    for place, rung in enumerate(rungs, 1):
        for text in (html, markdown.replace("\\", ""), terminal):
            assert f"{place}. {rung.change}" in text
    assert "`None" not in terminal and "None " not in terminal
    assert "After awq-fp8kv" in html and "After awq" in html and 'id="rescue"' in html
    assert "awq-fp8kv lost quality; next worth trying:" in terminal
    assert max(map(len, verdict_table(bundle.verdict, bundle.plan).splitlines())) <= 110


def test_no_ladder_no_section() -> None:
    html, markdown = render(sample_results())
    assert "What to try next" not in html and "What to try next" not in markdown
    assert "worth trying" not in verdict_table(sample_results().verdict)
