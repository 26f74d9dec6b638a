"""The search: with probes that know, and with simulated ones whose true limit is known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from pipeline.load.bounds import Bound
from pipeline.load.metrics import Limits
from pipeline.load.search import Axis, Expected, search
from pipeline.load.slo import (
    SearchPlan,
    Slo,
    arrivals,
    expected_of,
    make_judge,
    probe_result,
    search_result,
)
from tests.support.load_records import level_cell
from tests.support.simulated_load import SimulatedSession
from tests.support.slo_trials import (
    CLOSED_PLAN,
    KNEE,
    closed_cell,
    grid_requests,
    open_cell,
    run_cell,
    run_search,
    seen_at_levels,
)

WHOLE = Axis(start=1, minimum=1, maximum=64, whole=True, resolution=0)


def oracle(limit: float, undecided: tuple[float, ...] = ()) -> tuple[list[float], object]:
    tried: list[float] = []

    def probe(load: float) -> Bound:
        tried.append(load)
        return "undecided" if load in undecided else "pass" if load <= limit else "fail"

    return tried, probe


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 21, 33, 63])
@pytest.mark.parametrize("start", [1, 6, 64])
def test_lands_on_any_limit_from_any_start(limit: int, start: int) -> None:
    tried, probe = oracle(limit)
    found = search(Axis(start, 1, 64, True, 0), probe)  # type: ignore[arg-type]
    assert (found.low, found.high, found.stopped) == (limit, limit, False)
    assert len(tried) == len(set(tried)) <= 13


def test_limit_beyond_the_axis_and_none_at_all() -> None:
    _, probe = oracle(100)
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (64, None)
    _, probe = oracle(0)
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (None, 0)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 21, 39, 40, 41, 63, 64])
@pytest.mark.parametrize(
    "expected",
    [
        Expected(8, 40),
        Expected(40, None),
        Expected(None, 8),
        Expected(64, None),
        Expected(None, 1),
        Expected(9, 10),
    ],
)
def test_expectations_right_or_wrong_change_no_answer(limit: int, expected: Expected) -> None:
    tried, probe = oracle(limit)
    found = search(Axis(16, 1, 64, True, 0), probe, expected=expected)  # type: ignore[arg-type]
    assert (found.low, found.high) == (limit or None, None if limit == 64 else limit)
    assert len(tried) == len(set(tried)) <= 14


def test_a_right_expectation_saves_probes_and_its_ends_are_probed_too() -> None:
    """Between a level that seemed to hold and one that seemed to break: the answer is still one that probes gave."""
    tried, probe = oracle(8)
    assert search(WHOLE, probe, expected=Expected(8, 40)).low == 8  # type: ignore[arg-type]
    assert tried == [24, 16, 12, 10, 9, 8]
    tried, probe = oracle(30)
    search(Axis(20, 1, 64, True, 0), probe, expected=Expected(2))  # type: ignore[arg-type]
    assert tried[:2] == [20, 40]  # a level far below tells less than the start does
    tried, probe = oracle(100)
    assert search(WHOLE, probe, expected=Expected(40)).high is None  # type: ignore[arg-type]
    assert tried == [64]


@pytest.mark.parametrize("knee", [25, 50, 70, 100])
def test_levels_save_requests_at_equal_conclusions(knee: int) -> None:
    """chat-60's levels, p99 and axis on the simulated server: a third less at least, and the same answer on average."""
    slo = Slo(Limits(1e6, 40.0), 0.99, 0.99)
    plan = SearchPlan("closed", Axis(16, 1, 128, True, 0.05), max_requests=1500)
    levels = {1: 32, 16: 192, 32: 384, 60: 720}
    without, steered = [], []
    for seed in range(12):
        without.append(run_search(seed, plan=plan, slo=slo, knee=knee, slots=128))
        known = seen_at_levels(seed, levels, plan, slo, knee)
        steered.append(run_search(seed, plan=plan, slo=slo, knee=knee, slots=128, expected=known))
    assert sum(requests for _, requests in steered) <= 0.7 * sum(requests for _, requests in without)
    for found, _ in steered:
        assert found.low <= knee <= found.high + max(1, 0.05 * knee)


def test_what_levels_let_a_search_expect() -> None:
    slo = Slo(Limits(1000, 50), 0.9, 0.95)
    plan = SearchPlan("closed", Axis(1, 2, 32, True, 0), max_requests=60)

    def expected(*cells: tuple[int, int, int], cpu: float = 0.1, mode: str = "closed") -> Expected:
        """(concurrency, measured requests, of them over a limit)."""
        records, levels = [], []
        for level, measured, over in cells:
            found, figures = level_cell(level, measured, over, cpu)
            records += found
            levels.append(figures)
        return expected_of(levels, records, slo, plan if mode == "closed" else replace(plan, mode="open"))

    assert expected((4, 20, 2), (8, 20, 3)) == Expected(4, 8)  # 10 % may be over
    assert expected((4, 20, 3), (8, 20, 0)) == Expected(8)  # latency grows with load: 4 was an accident
    assert expected((1, 20, 0), (40, 20, 0)) == Expected(32)  # within the axis
    assert expected((1, 20, 20), (40, 20, 20)) == Expected()
    assert expected((4, 20, 20), (8, 20, 20)) == Expected(None, 4)
    assert expected((4, 20, 0), cpu=0.95) == Expected()  # the client, not the server, was measured
    assert expected((4, 20, 0), mode="open") == Expected()


def test_undecided_stays_an_interval_and_is_never_rounded_up() -> None:
    """19, 20 and 21 can't be told: 18 is the last that passed, 22 the first that failed. No load is tried twice."""
    tried, probe = oracle(18, undecided=(19, 20, 21))
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (18, 21)
    assert len(tried) == len(set(tried))
    tried, probe = oracle(12, undecided=(13, 14, 15))
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (12, 15)
    assert len(tried) == len(set(tried))


def test_undecided_at_the_top_of_the_climb_still_finds_where_it_fails() -> None:
    _, probe = oracle(14, undecided=(15, 16, 17))
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (14, 17)
    _, probe = oracle(63, undecided=(64,))
    found = search(WHOLE, probe)  # type: ignore[arg-type]
    assert (found.low, found.high) == (63, None)


def test_budget_ends_it_with_a_wider_interval() -> None:
    left = iter([True] * 5 + [False])
    _, probe = oracle(21)
    found = search(WHOLE, probe, may_go_on=lambda: next(left))  # type: ignore[arg-type]
    assert found.stopped
    assert found.low is not None and found.high is not None
    assert found.low <= 21 <= found.high and found.high > found.low


def test_rates_are_told_apart_by_the_resolution() -> None:
    axis = Axis(start=1, minimum=0.1, maximum=100, whole=False, resolution=0.1)
    tried, probe = oracle(7.3)
    found = search(axis, probe)  # type: ignore[arg-type]
    assert found.low is not None and found.high is not None
    assert found.low <= 7.3 <= found.high * 1.1
    assert found.high <= found.low * 1.1
    assert len(tried) <= 10
    assert len(axis.points()) == 1 + math.floor(math.log(1000) / math.log(1.1))


def test_simulated_search_lands_on_the_true_limit_in_95_of_100_seeds() -> None:
    """And does so with a fraction of the requests of a grid that judges every load by the same bound."""
    searches = [run_search(seed) for seed in range(100)]
    landed = sum((found.low, found.high) == (KNEE, KNEE) for found, _ in searches)
    never_above = sum(found.low is not None and found.low <= KNEE for found, _ in searches)
    assert landed >= 95 and never_above >= 95
    spent = sum(requests for _, requests in searches) / len(searches)
    assert spent <= 0.5 * grid_requests(seed=0)


def test_a_smooth_limit_is_inside_the_interval() -> None:
    """TPOT grows with every stream by a few percent: neighbours can't be told apart, the interval says so."""
    plan = SearchPlan("closed", Axis(1, 1, 64, True, 0), max_requests=200)
    slo = Slo(Limits(1e9, 40.0), 0.9, 0.95)
    # gap x (1 + 0.02 (n - 1)) x exp(0.2 z) <= 40 ms at p90: 20 (1 + 0.02 (n - 1)) 1.2922 = 40, n = 28.4
    covered = exact = 0
    for seed in range(20):
        found, _ = run_search(seed, plan=plan, slo=slo, knee=None, slowing=0.02)
        assert found.low is not None
        covered += found.low <= 28 and (found.high is None or found.high >= 28)
        exact += found.low == found.high
    assert covered >= 19
    assert exact <= 10  # where it can't be told it isn't claimed


def test_open_loop_passes_below_capacity_and_fails_above() -> None:
    """Four slots of 1 s each serve 4 requests/s; the queue of an overload shows after the warm-up."""
    plan = SearchPlan("open", Axis(1, 0.25, 16, False, 0.1), max_requests=120)
    slo = Slo(Limits(2000, 1000), 0.9, 0.95)
    probes = []

    def probe(load: float) -> Bound:
        cell_requests = plan.requests(load, slo)
        records = open_run(load, cell_requests, slo, plan)
        probes.append(probe_result(records, load, slo, plan))
        return probes[-1].decision

    found = search(plan.axis, probe)
    result = search_result(plan, slo, found, probes, 1.0)
    assert result.low is not None and 2.5 <= result.low <= 4.0
    assert result.high is not None and result.high <= 4.6
    assert all(item.schedule_lag_p99_ms == pytest.approx(0) for item in result.probes)


def open_run(load: float, count: int, slo: Slo, plan: SearchPlan) -> list[object]:
    session = SimulatedSession(slots=4, seed=3, ttft_s=0.2, gap_s=0.8 / 7, sigma=0.05)
    return run_cell(session, open_cell(load, count, plan.warmup(load, slo)), make_judge(slo, plan, load))


def test_a_saturated_client_decides_nothing() -> None:
    session = SimulatedSession(slots=4, seed=3)
    slo = Slo(Limits(2000, 1000), 0.9, 0.95)
    records = run_cell(session, closed_cell(2, 60), make_judge(slo, CLOSED_PLAN, 2))
    assert probe_result(records, 2, slo, CLOSED_PLAN, client_cpu_share=0.5).decision == "pass"
    busy = probe_result(records, 2, slo, CLOSED_PLAN, client_cpu_share=0.97)
    assert (busy.decision, busy.client_saturated) == ("undecided", True)


def test_arrivals_are_poisson_at_the_rate_and_reproducible() -> None:
    times = arrivals(4.0, 2000, "seed")
    assert times == arrivals(4.0, 2000, "seed") != arrivals(4.0, 2000, "other")
    assert times[-1] == pytest.approx(500)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap > 0 for gap in gaps)
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)


def test_an_slo_that_nothing_meets_says_so_with_the_best_seen() -> None:
    slo = Slo(Limits(1, 1), 0.9, 0.95)
    found, _, probes = run_search(0, slo=slo, with_probes=True)
    result = search_result(CLOSED_PLAN, slo, found, probes, 1.0)
    assert result.low is None
    assert "no load meets the SLO: the best seen, at 1, is TTFT" in result.note
    assert "the limits are 1 and 1 ms" in result.note


def test_a_search_that_does_not_go_down_to_one_stream_says_so() -> None:
    plan = SearchPlan("closed", Axis(16, 16, 64, True, 0.2), max_requests=60)
    slo = Slo(Limits(1, 1), 0.9, 0.95)
    found, _, probes = run_search(0, plan=plan, slo=slo, with_probes=True)
    result = search_result(plan, slo, found, probes, 1.0)
    assert (result.low, result.high) == (None, 15)
    assert result.note.startswith("no load from 16 streams on meets the SLO: the best seen, at 16, is TTFT")
