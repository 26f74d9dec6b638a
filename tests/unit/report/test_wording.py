"""Numbers as text: signs, units, and the words for a missing one."""

from __future__ import annotations

import pytest

from pipeline.report import wording
from pipeline.report.wording import NOT_MEASURED


@pytest.mark.parametrize(
    "function",
    [
        wording.count,
        wording.number,
        wording.latency,
        wording.speed,
        wording.percent,
        wording.points,
        wording.points_interval,
        wording.percent_interval,
        wording.probability,
        wording.mebibytes,
        wording.seconds,
    ],
)
def test_none_is_said_in_words(function) -> None:  # type: ignore[no-untyped-def]
    assert function(None) == NOT_MEASURED


def test_a_half_missing_interval_is_missing() -> None:
    assert wording.points_interval([0.01, None]) == NOT_MEASURED


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0"), (-0.0004, "0.0"), (0.0004, "0.0"), (-0.0123, "\u22121.2"), (0.0123, "+1.2")],
)
def test_points_carry_a_sign_unless_they_round_to_zero(share: float, text: str) -> None:
    assert wording.points(share) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (-0.03, "accuracy", "\u22123.0 pt"),
        (0.995, "share of requests", "99.5\u00a0%"),
        (40.0, "sequences", "40 sequences"),
        (1234.56, "ms", "1,235 ms"),
        (None, "ms", NOT_MEASURED),
    ],
)
def test_gate_numbers_follow_their_unit(value: float | None, unit: str, text: str) -> None:
    assert wording.gate_number(value, unit) == text


@pytest.mark.parametrize(("value", "text"), [(1024**2, "1.0 MiB"), (1024**3, "1.00 GiB"), (0, "0.0 MiB")])
def test_bytes_are_binary_units(value: int, text: str) -> None:
    assert wording.mebibytes(value) == text


def test_sentence_is_one_line_with_one_stop() -> None:
    assert wording.sentence("only 13 fit,\n 24 are needed..") == "Only 13 fit, 24 are needed."
