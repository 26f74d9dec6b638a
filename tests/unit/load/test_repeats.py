"""When a level is repeated no more: never before three, never while its verdict may still change."""

from __future__ import annotations

import pytest

from pipeline.load.metrics import Limits
from pipeline.load.records import RequestRecord
from pipeline.load.repeats import is_settled
from pipeline.load.slo import Slo
from pipeline.results import LoadLevel
from tests.support.load_records import level_cell

P90 = Slo(Limits(1000, 50), 0.9, 0.95)  # takes 29 requests at least
NARROW = 0.05


def repeated(
    gaps_s: list[float], measured: int = 8, over: int = 0
) -> tuple[list[LoadLevel], list[RequestRecord]]:
    levels, records = [], []
    for repeat, gap_s in enumerate(gaps_s, start=1):
        found, figures = level_cell(2, measured, over, repeat=repeat, gap_s=gap_s)
        levels.append(figures)
        records += found
    return levels, records


def settled(gaps_s: list[float], planned: int, measured: int = 8, over: int = 0) -> bool:
    levels, records = repeated(gaps_s, measured, over)
    return is_settled(levels, records, NARROW, P90, planned)


def test_three_equal_repeats_settle_a_level_that_could_never_meet_the_percentile() -> None:
    assert [settled([0.01] * count, planned=24) for count in (0, 1, 2, 3)] == [False, False, False, True]


def test_wide_intervals_and_drift_go_on() -> None:
    assert not settled([0.01, 0.013, 0.01], planned=24)
    assert not settled([0.0100, 0.0104, 0.0108], planned=24)  # narrow enough, but on its way somewhere


def test_a_level_that_may_still_meet_the_slo_gets_all_of_its_repeats() -> None:
    assert not settled([0.01] * 3, planned=40)


@pytest.mark.parametrize(("over", "decided"), [(1, False), (4, True)])
def test_one_that_breaks_it_beyond_doubt_does_not(over: int, decided: bool) -> None:
    assert settled([0.01] * 3, planned=40, over=over) is decided


def test_other_levels_requests_do_not_count() -> None:
    levels, records = repeated([0.01] * 3)
    others, _ = level_cell(4, 40, 40)
    assert not is_settled(levels, [*records, *others], NARROW, P90, planned=40)
