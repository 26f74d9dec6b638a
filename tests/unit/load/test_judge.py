"""The sequential bound: its error is the one asked for, whatever the order and however early the look."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pipeline.errors import UserInputError
from pipeline.load.judge import Boundary, Judge, boundary
from pipeline.load.metrics import Limits
from tests.support.load_records import failed, record

LIMITS = Limits(ttft_ms=1000, tpot_ms=100)
P90 = boundary(0.9, 0.95, 150)


def walk(line: Boundary, share: float, rng: random.Random) -> str:
    """One probe's decision where each request is over the limit with this chance."""
    over = 0
    for n in range(1, line.max_requests + 1):
        over += rng.random() < share
        if over >= line.fail_at[n]:
            return "fail"
        if over <= line.pass_at[n]:
            return "pass"
    return "undecided"


@pytest.mark.parametrize("percentile", [0.75, 0.9])
def test_errors_over_all_looks_stay_within_the_confidence(percentile: float) -> None:
    """At the edge, where a wrong answer is likeliest: 1 in 20 may pass or fail, 4,000 walks leave 3 s.e. = 1 %."""
    line, rng = boundary(percentile, 0.95, 150), random.Random(1)
    decisions = [walk(line, 1 - percentile, rng) for _ in range(4000)]
    assert decisions.count("pass") / 4000 <= 0.06
    assert decisions.count("fail") / 4000 <= 0.035
    # A look after every request at the plain bound's level would pass twice as often.
    assert decisions.count("pass") / 4000 >= 0.02


def test_clear_cases_are_decided_early() -> None:
    rng = random.Random(2)
    good = [walk(P90, 0.0, rng) for _ in range(5)]
    assert good == ["pass"] * 5
    first_pass = next(n for n, most in enumerate(P90.pass_at) if most >= 0)
    assert (
        29 <= first_pass <= 45
    )  # 29 is the single look's sample (0.9 ** 29 < 0.05); the price of looking often is small
    assert P90.fail_at[3] <= 3  # three of three over


def test_too_small_a_probe_is_refused_with_the_number_it_takes() -> None:
    with pytest.raises(UserInputError, match=r"max_requests is 28; p90 at 95% .* fewer than 29"):
        boundary(0.9, 0.95, 28)


def judge(warmup: int = 0) -> Judge:
    return Judge(LIMITS, P90, warmup)


def test_all_within_the_limits_pass() -> None:
    found = judge()
    for index in range(50):
        found.see(record(index, 0.0, 0.5, 0.01))
    assert found.judgement().decision == "pass"


@pytest.mark.parametrize(
    "bad", [record(0, 0.0, 1.5, 0.01), record(0, 0.0, 0.5, 0.2), failed(record(0, 0.0, 0.5, 0.01))]
)
def test_either_limit_and_failures_count_as_over(bad: object) -> None:
    found = judge()
    for index in range(4):
        found.see(dataclasses.replace(bad, index=index))  # type: ignore[type-var]
    assert found.judgement().decision == "fail"


def test_requests_in_flight_are_never_counted_in_favour() -> None:
    """The 50 quick ones ended first; the one that was sent before them is still in flight, and may yet be anything."""
    found = judge()
    line = P90.pass_at.index(0)
    for index in range(1, line + 1):
        found.see(record(index, 0.0, 0.5, 0.01))
    assert found.judgement().decision == "undecided"
    found.see(record(0, 0.0, 0.5, 0.01))
    assert found.judgement().decision == "pass"


def test_warm_up_and_stopped_requests_say_nothing() -> None:
    found = judge(warmup=10)
    for index in range(10):
        found.see(record(index, 0.0, 9.0, 0.01, warmup=True))
    found.see(dataclasses.replace(failed(record(10, 0.0, 0.5, 0.01)), error=None, stopped=True))
    assert found.judgement().judged == 0
    assert found.judgement().decision == "undecided"
