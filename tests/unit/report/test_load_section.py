"""The load section: answers as intervals, refused percentiles as what they need, failures as failures."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.report import render
from pipeline.report.sections.load import _percentile, answers_table, interval, levels_table
from pipeline.results import Distribution
from tests.support.load_results import slo_search
from tests.support.sample_results import sample_results


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"low": 16, "high": 19}, "16 to 19"),
        ({"low": 16, "high": 16}, "16"),
        ({"low": 64, "high": None}, "64 or more"),
        ({"low": None, "high": 0}, "none"),
        ({"low": None, "high": 3}, "none to 3"),
        ({"low": None, "high": None}, "undecided"),
        ({"mode": "open", "unit": "requests/s", "low": 1.5, "high": 1.65}, "1.50 to 1.65"),
    ],
)
def test_the_answer_is_an_interval(changes: dict[str, Any], text: str) -> None:
    assert interval(slo_search(**changes)) == text


def distribution(**changes: Any) -> Distribution:
    values: dict[str, Any] = dict.fromkeys(("mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "max_ms"))
    return Distribution(**{"n": 20, **values, **changes})


def test_percentiles_are_figures_needs_or_failures() -> None:
    assert _percentile(distribution(p50_ms=12.5), "p50").text == "12.5"
    refused = _percentile(distribution(needs={"p90": 44}), "p90")
    assert (refused.text, refused.kind, refused.note) == ("needs 44", "missing", "20 measured")
    assert _percentile(distribution(), "p50").text == "failed"
    assert _percentile(distribution(n=0), "p50").text == "not measured"


@pytest.mark.usefixtures("without_plots")
def test_every_variant_has_its_answers_on_both_forms() -> None:
    bundle = sample_results()
    rows = answers_table(bundle).rows
    assert [row[0].text for row in rows] == bundle.variants
    awq = next(row for row in rows if row[0].text == "awq")
    assert [cell.text for cell in awq[1:]] == ["26", "26", "13 to 14", "not measured"]
    html, markdown = render(bundle)
    for text in ("13 to 14", "Fill test", "What FP8 KV changes", "within one"):
        assert text in html and text in markdown
    assert "no steady window: 8 requests on 4 streams" in markdown


def test_failed_requests_and_repeats_are_said() -> None:
    bundle = sample_results()
    measured = bundle.measurements["awq"]
    assert measured is not None
    levels = [measured.levels[0].model_copy(update={"failed": 2, "repeat": 2})]
    changed = {**bundle.measurements, "awq": measured.model_copy(update={"levels": levels})}
    object.__setattr__(bundle, "measurements", changed)
    (row,) = [row for row in levels_table(bundle).rows if row[0].text == "awq"]
    assert row[1].note == "repeat 2"
    assert row[2].note == "2 failed\n4 of them warm-up"
