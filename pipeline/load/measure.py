"""All cells of one variant against one running server: what fits, what load costs, how many streams meet the SLO.

The three are asked apart and never mixed: the fill test's requests tell nothing of latency, the levels' cells run to
their end whatever they show, and the searches' probes stop as soon as they are decided. What the levels showed only tells a
search where to begin, and whether a level need be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import EngineFailedError
from pipeline.laps import Laps
from pipeline.load.bounds import Bound
from pipeline.load.driver import Cell, CellResult, LoadSession, Request, Target
from pipeline.load.fill import FILL_CELL, FillPlan, fill_result
from pipeline.load.metrics import hit_rate, summarise, window
from pipeline.load.records import RequestRecord
from pipeline.load.repeats import is_settled
from pipeline.load.search import search
from pipeline.load.slo import (
    SearchPlan,
    Slo,
    arrivals,
    expected_of,
    make_judge,
    probe_result,
    search_result,
)
from pipeline.load.watch import STALL_TIMEOUT_S, LoadedServer, Sampler, Watch, never
from pipeline.load.workload import Source
from pipeline.results import Capacity, FillTest, LoadLevel, Probe, SloSearch

SAMPLE_WAIT_S = (
    60.0  # many times what a reading takes on a busy machine; its cell's counters are lost without it
)
IDLE_WAIT_S = 300.0  # a slow engine gives requests up only after the step that it's in
FILL_SAMPLE_S = 0.1  # a fast engine holds the pool full for some tenths of a second
MAX_PREFIX_HIT_RATE = 0.01
STAGGER_S = 0.005


@dataclass(frozen=True)
class LoadPlan:
    """Everything that is run on one variant."""

    source: Source
    levels: tuple[int, ...]
    requests_per_stream: float
    min_requests: int
    repeats: int
    warmup_requests: int
    slo: Slo
    fill: FillPlan | None
    fill_source: Source | None
    """Requests of the fill test's lengths."""
    searches: tuple[tuple[SearchPlan, float], ...]
    """Each with the seconds after the first cell from which on it starts no further probe."""
    capacity: Capacity
    """As planned."""
    reported_tokens: int
    seed: int
    repeat_until: float | None = None
    """Relative half-width of a level's intervals from which on it isn't repeated; None: as often as `repeats` says."""

    def measured_requests(self, level: int) -> int:
        """Requests of one level after its warm-up; never fewer than the level, which would not hold its concurrency."""
        return measured_requests(level, self.requests_per_stream, self.min_requests)


def measured_requests(level: int, per_stream: float, least: int) -> int:
    """Requests of one level after its warm-up, as `LoadSettings` asks for them."""
    return max(level, least, math.ceil(round(per_stream * level, 9)))


@dataclass
class LoadOutcome:
    """What has been measured so far: filled cell by cell, so that what is finished is there when the engine dies."""

    levels: list[LoadLevel] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    fill: FillTest | None = None
    searches: list[SloSearch] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    """Of all searches, the unfinished one included."""
    laps: Laps = field(default_factory=Laps)


def run_load(
    plan: LoadPlan,
    session: LoadSession,
    server: LoadedServer,
    sampler: Sampler,
    outcome: LoadOutcome,
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> None:
    """Run everything in `plan`, taking each finished cell into `outcome`.

    `EngineFailedError`: the engine died (with its cause) or made no token for `stall_timeout_s`, every request of a cell
    failed, token counts don't agree, or prompts were answered from the prefix cache.
    """
    runner = _Runner(session, server, sampler, stall_timeout_s, plan, outcome, time.monotonic())
    with sampler.often(FILL_SAMPLE_S):
        runner.warm_up()  # ends with a sample, so that the fill test's first isn't half a second away
        outcome.laps.end("warm-up")
        if runner.fill():
            outcome.laps.end("fill")
    for repeat in range(1, plan.repeats + 1):
        for level in plan.levels:
            if not runner.is_settled(level):
                runner.level(level, repeat)
                outcome.laps.end("levels")
    for search_plan, until_s in plan.searches:
        runner.search(search_plan, until_s)
        outcome.laps.end(f"{search_plan.mode} search")


@dataclass(frozen=True)
class _Runner:
    session: LoadSession
    server: LoadedServer
    sampler: Sampler
    stall_timeout_s: float
    plan: LoadPlan
    outcome: LoadOutcome
    started_s: float

    def warm_up(self) -> None:
        """The engine's first requests of any size, whose records nobody sees."""
        count = self.plan.warmup_requests
        if count:
            self._run(Cell("warmup", self.plan.source.requests("warmup", count), concurrency=count))
        _await_sample(self.sampler, time.monotonic())  # the counters' starting point

    def fill(self) -> bool:
        """Until the first request ends: then the pool has been as full as it gets (see `fill.py`). False where none is planned."""
        given = self.plan.fill
        if given is None or self.plan.fill_source is None:
            return False
        requests = self.plan.fill_source.requests(FILL_CELL, given.offered)
        cell = Cell(FILL_CELL, requests, concurrency=given.offered, stagger_s=STAGGER_S)
        ended: list[RequestRecord] = []
        result = self._measured(cell, see=ended.append, enough=lambda: bool(ended))
        self.outcome.fill = fill_result(
            given, self.plan.capacity, self.plan.reported_tokens, result.records, list(self.sampler.timeline)
        )
        return True

    def level(self, level: int, repeat: int) -> None:
        """One cell of fixed size. The warm-up is one request per stream, and runs into the measured ones."""
        name = f"level-{level}" if self.plan.repeats == 1 else f"level-{level}-repeat-{repeat}"
        requests = self.plan.source.requests(name, level + self.plan.measured_requests(level))
        result = self._measured(self._closed(name, requests, level))
        self.outcome.levels.append(
            summarise(
                result.records,
                list(self.sampler.timeline),
                self.plan.slo.limits,
                repeat=repeat,
                client_cpu_share=result.client_cpu_share,
            )
        )

    def is_settled(self, level: int) -> bool:
        """Whether another repeat of a level would decide nothing."""
        plan = self.plan
        if plan.repeat_until is None:
            return False
        done = [found for found in self.outcome.levels if found.concurrency == level]
        planned = plan.repeats * plan.measured_requests(level)
        return is_settled(done, self.outcome.records, plan.repeat_until, plan.slo, planned)

    def search(self, plan: SearchPlan, until_s: float) -> None:
        """One search, which begins where the levels leave it open; its probes are cells that stop once they are decided."""
        started = time.monotonic()
        probes: list[Probe] = []

        def probe(load: float) -> Bound:
            probes.append(self._probe(plan, load))
            self.outcome.probes.append(probes[-1])
            return probes[-1].decision

        found = search(
            plan.axis,
            probe,
            may_go_on=lambda: time.monotonic() - self.started_s < until_s,
            expected=expected_of(self.outcome.levels, self.outcome.records, self.plan.slo, plan),
        )
        self.outcome.searches.append(
            search_result(plan, self.plan.slo, found, probes, time.monotonic() - started)
        )

    def _probe(self, plan: SearchPlan, load: float) -> Probe:
        slo = self.plan.slo
        name = f"{plan.mode}-{load:.6g}"
        requests = self.plan.source.requests(name, plan.requests(load, slo))
        warmup = plan.warmup(load, slo)
        if plan.mode == "closed":
            cell = self._closed(name, requests, round(load))
        else:
            times = arrivals(load, len(requests), f"{self.plan.seed}/{name}")
            cell = Cell(name, requests, warmup=warmup, arrivals_s=times)
        judge = make_judge(slo, plan, load)
        result = self._measured(cell, see=judge.see, enough=lambda: judge.judgement().decision != "undecided")
        return probe_result(result.records, load, slo, plan, result.client_cpu_share)

    def _closed(self, name: str, requests: tuple[Request, ...], level: int) -> Cell:
        return Cell(name, requests, concurrency=level, warmup=level, stagger_s=STAGGER_S)

    def _measured(
        self,
        cell: Cell,
        *,
        see: Callable[[RequestRecord], None] | None = None,
        enough: Callable[[], bool] = never,
    ) -> CellResult:
        """A cell whose records are kept, and after which the server is idle and sampled once more."""
        result = self._run(cell, see=see, enough=enough)
        self.outcome.records.extend(result.records)
        if any(record.stopped for record in result.records):
            self._await_idle()
        # The next cell starts after this sample, so that what the counters grew by belongs to one cell only.
        _await_sample(self.sampler, window(result.records)[1])
        self._require_distinct_prompts(cell, result.records)
        return result

    def _run(
        self,
        cell: Cell,
        *,
        see: Callable[[RequestRecord], None] | None = None,
        enough: Callable[[], bool] = never,
    ) -> CellResult:
        """One cell, watched; raises where its records would not be a measurement."""
        title = f"{self.server.served_name} {self._position(cell)}"
        watch = Watch(
            cell, self.server, self.sampler, self.stall_timeout_s, see=see, enough=enough, title=title
        )
        target = Target(self.server.base_url, self.server.served_name)
        try:
            result = self.session.run(target, cell, watch)
        except EngineFailedError:
            self.outcome.records.extend(watch.records)
            self.server.check()  # a dead engine is the better explanation of whatever the driver saw
            raise
        finally:
            watch.finish()
        failed = [record for record in result.records if record.failed]
        if failed:
            self.server.check()
        if failed and len(failed) == sum(not record.stopped for record in result.records):
            raise EngineFailedError(
                f"all {len(failed)} requests at {cell.name} failed: {failed[0].error}; details are in {result.raw_path}"
            )
        return result

    def _position(self, cell: Cell) -> str:
        """Which of the variant's cells it is; how many probes a search takes isn't known before its end."""
        if cell.name.startswith("level-"):
            return f"[{len(self.outcome.levels) + 1}/{len(self.plan.levels) * self.plan.repeats}] "
        return f"[probe {len(self.outcome.probes) + 1}] " if cell.warmup else ""

    def _await_idle(self) -> None:
        """Wait until the server has let go of the requests that were given up; the next cell must not meet them."""
        asked = time.monotonic()
        deadline = asked + IDLE_WAIT_S
        while time.monotonic() < deadline:
            row = self.sampler.timeline[-1] if self.sampler.timeline else None
            if row is not None and row["t_s"] > asked and not row.get("running") and not row.get("waiting"):
                return
            time.sleep(0.05)
        self.server.check()

    def _require_distinct_prompts(self, cell: Cell, records: Sequence[RequestRecord]) -> None:
        if self.plan.source.about_prefixes and cell.name != FILL_CELL:
            return
        rate = hit_rate(list(self.sampler.timeline), *window(records))
        if rate is not None and rate > MAX_PREFIX_HIT_RATE:
            raise EngineFailedError(
                f"{rate:.1%} of the prompt tokens of {cell.name} came from the prefix cache "
                f"(at most {MAX_PREFIX_HIT_RATE:.0%}); the load's prompts are distinct, so its speed can't be trusted"
            )


def _await_sample(sampler: Sampler, after_s: float) -> None:
    """Wait for a server sample later than `after_s`; without one the figures that need it stay None."""
    deadline = time.monotonic() + SAMPLE_WAIT_S
    while time.monotonic() < deadline:
        if sampler.timeline and sampler.timeline[-1]["t_s"] >= after_s:
            return
        time.sleep(0.05)
