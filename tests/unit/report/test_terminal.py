"""The verdict as plain text."""

from __future__ import annotations

from pipeline.report import verdict_table
from pipeline.report.wording import NOT_MEASURED
from tests.support.sample_results import SHAPES, sample_results


def row_of(text: str, variant: str) -> str:
    return next(line for line in text.splitlines() if line.split("  ")[0].strip() == variant)


def test_every_variant_has_its_decision_and_its_reason() -> None:
    bundle = sample_results()
    text = verdict_table(bundle.verdict)
    assert text.startswith("bf16-fp8kv is GO")
    for name, result in bundle.verdict.variants.items():
        assert result.decision in row_of(text, name)
    assert "about 526 items would decide it" in text
    assert "13 / 24" in row_of(text, "bf16")


def test_columns_line_up_within_the_width() -> None:
    lines = verdict_table(sample_results().verdict).splitlines()
    assert max(map(len, lines)) <= 110
    rule = next(line for line in lines if line.startswith("---"))
    start = rule.split("  ")[0]
    rows = [line for line in lines if line.split("  ")[0].strip() in SHAPES][: len(SHAPES)]
    assert all(row[len(start) : len(start) + 2] == "  " for row in rows)


def test_missing_results_are_said_and_never_zero() -> None:
    row = row_of(verdict_table(sample_results(frozenset({"awq"})).verdict), "awq")
    assert row.count(NOT_MEASURED) == 4
    assert "INCONCLUSIVE" in row
    assert not any(sign.isdigit() for sign in row)


def test_emulated_speed_and_memory_are_marked() -> None:
    bundle = sample_results()
    text = verdict_table(bundle.verdict, bundle.plan)
    assert row_of(text, "awq").endswith("*") and not row_of(text, "bf16").endswith("*")
    assert "emulated memory budget of 512.0 MiB, not a card" in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    bundle = sample_results()
    variants = {f"\x1b[31m{name}\r": result for name, result in bundle.verdict.variants.items()}
    verdict = bundle.verdict.model_copy(
        update={"variants": variants, "reference": "\x1b[31mbf16\r", "control": None}
    )
    text = verdict_table(verdict)
    assert "\x1b" not in text and "\r" not in text


def test_quality_has_its_own_columns() -> None:
    text = verdict_table(sample_results().verdict)
    quality = text.split("items needed")[1].split("\n\n")[0].splitlines()
    rows = {line.split("  ")[0].strip(): line for line in quality if line.split("  ")[0].strip() in SHAPES}
    assert "23, 0" in rows["awq"] and "526" in rows["awq"]
    assert "decided" in rows["bf16-again"]
    assert "0.1150 +- 0.0046" in rows["awq"] and "92.3 %" in rows["awq"]
    assert max(map(len, text.splitlines())) <= 110
