"""Searches over the simulated server, for the unit test and for `make bench`."""

from __future__ import annotations

from typing import Any

from pipeline.load.bounds import Bound
from pipeline.load.driver import Cell, Request
from pipeline.load.judge import Judge
from pipeline.load.metrics import Limits, summarise
from pipeline.load.records import RequestRecord
from pipeline.load.search import NOTHING, Axis, Expected, search
from pipeline.load.slo import SearchPlan, Slo, arrivals, expected_of, make_judge, probe_result
from tests.support.simulated_load import TARGET, SimulatedSession

KNEE = 21
"""Up to so many streams 2.9 % of the requests are over the limit below, with one more 94 %: the true limit at p90."""
SLO = Slo(Limits(ttft_ms=1e6, tpot_ms=29.2), percentile=0.9, confidence=0.95)  # 20 ms x exp(0.2 x 1.9)
TOKENS = 8
CLOSED_PLAN = SearchPlan("closed", Axis(1, 1, 64, whole=True, resolution=0), max_requests=150)


class JudgeObserver:
    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def request(self, record: RequestRecord) -> None:
        self._judge.see(record)

    def tick(self) -> bool:
        return self._judge.judgement().decision != "undecided"


def closed_cell(load: int, count: int) -> Cell:
    return Cell(f"closed-{load}", (Request((1,), TOKENS),) * count, concurrency=load, warmup=load)


def open_cell(rate: float, count: int, warmup: int) -> Cell:
    return Cell(
        f"open-{rate:g}",
        (Request((1,), TOKENS),) * count,
        warmup=warmup,
        arrivals_s=arrivals(rate, count, "trial"),
    )


def run_cell(session: SimulatedSession, cell: Cell, judge: Judge) -> Any:
    return session.run(TARGET, cell, JudgeObserver(judge)).records


def run_search(
    seed: int,
    *,
    plan: SearchPlan = CLOSED_PLAN,
    slo: Slo = SLO,
    knee: int | None = KNEE,
    slowing: float = 0.0,
    with_probes: bool = False,
    slots: int = 64,
    expected: Expected = NOTHING,
) -> Any:
    """(found, requests sent), with the probes where asked for."""
    session = SimulatedSession(slots, seed, knee=knee, slowing=slowing)
    probes = []

    def probe(load: float) -> Bound:
        cell = closed_cell(round(load), plan.requests(load, slo))
        records = run_cell(session, cell, make_judge(slo, plan, load))
        probes.append(probe_result(records, load, slo, plan))
        return probes[-1].decision

    found = search(plan.axis, probe, expected=expected)
    return (found, session.sent, probes) if with_probes else (found, session.sent)


def grid_requests(seed: int, plan: SearchPlan = CLOSED_PLAN, slo: Slo = SLO) -> int:
    """Requests of a full grid of the same resolution, each load judged by the same bound and stopped as early."""
    session = SimulatedSession(64, seed, knee=KNEE)
    for load in plan.axis.points():
        run_cell(session, closed_cell(round(load), plan.requests(load, slo)), make_judge(slo, plan, load))
    return session.sent


class _ToItsEnd:
    def request(self, record: RequestRecord) -> None:
        pass

    def tick(self) -> bool:
        return False


def seen_at_levels(seed: int, levels: dict[int, int], plan: SearchPlan, slo: Slo, knee: int) -> Expected:
    """What a search may expect after levels: concurrency -> measured requests."""
    session = SimulatedSession(128, seed, knee=knee)
    records: list[RequestRecord] = []
    figures = []
    for level, measured in levels.items():
        cell = Cell(f"level-{level}", (Request((1,), TOKENS),) * (level + measured), level, warmup=level)
        found = session.run(TARGET, cell, _ToItsEnd()).records
        records += found
        figures.append(summarise(found, [], slo.limits, client_cpu_share=0.1))
    return expected_of(figures, records, slo, plan)
