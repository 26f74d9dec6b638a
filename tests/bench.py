"""`make bench`: performance as ratios measured side by side in one run, and what the planner, the load and the statistics promise, counted.

`python -m tests.bench plan peers` runs the sections named, without names all of them. Where two things are timed their runs
alternate, and the medians' ratio is printed: on a shared machine only that means something.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.capacity import Card, EngineRules, Geometry, Term, plan_row
from pipeline.errors import run_main
from pipeline.quality.intervals import paired_interval
from pipeline.quality.power import items_to_decide
from pipeline.quality.significance import mcnemar_exact
from tests import bench_geometry, bench_kernels, bench_peers, bench_quantize, bench_scoring
from tests.bench_load import accuracy, driver_overhead, search_saving
from tests.support.flips import coverage, false_go_rate, sequential_runs
from tests.support.geometries import SMOLLM2

ROUNDS = 7
POINTS = 100_000
RATES = (0.02, 0.05, 0.10, 0.15)
RUNS = 20_000


def main() -> None:
    sections: dict[str, Callable[[], None]] = {
        "speed": speed,
        "plan": plan_points,
        "statistics": statistics_tables,
        "load": load_tables,
        "peers": bench_peers.main,
        "geometry": bench_geometry.main,
        "quantize": bench_quantize.main,
        "scoring": bench_scoring.main,
        "kernels": bench_kernels.main,
    }
    chosen = sys.argv[1:] or list(sections)
    unknown = [name for name in chosen if name not in sections]
    if unknown:
        sys.exit(f"no such section: {', '.join(unknown)}; there are {', '.join(sections)}")
    for name in chosen:
        sections[name]()
        print(flush=True)


def speed() -> None:
    """Ours against something that does the same, or a part of it."""
    print(f"{'what':44} {'baseline':>10} {'ours':>10} {'ratio':>7}")
    _row("`quantgate plan` against `import hydra`", _import_hydra, _plan)
    differences = [random.Random(1).choice((-1, 0, 0, 0, 1)) for _ in range(800)]
    clusters = [str(index // 3) for index in range(800)]
    _row(
        "paired interval against McNemar's exact test",
        lambda: mcnemar_exact(differences.count(1), differences.count(-1)),
        lambda: paired_interval(differences, clusters, 0.95),
    )


def plan_points() -> None:
    """Points of a sweep: one variant at other lengths."""
    shape = Geometry.from_config(SMOLLM2)
    card = Card(2**29, 0.9, (Term("overhead", 2**26, 2**25, 2**27),))
    rules = EngineRules(block_size=128)
    started = time.perf_counter()
    for index in range(POINTS):
        plan_row("v", "bf16", "fp8", shape, (2**27,), card, rules, 512 + index % 4096)
    print(f"{POINTS:,} plan points in {time.perf_counter() - started:.2f} s")


def load_tables() -> None:
    """What the search saves, what the driver costs, how exact its figures are."""
    search_saving()
    driver_overhead()
    accuracy()


def statistics_tables() -> None:
    """Coverage and false GOs over all outcomes (fixed), by 20,000 runs each (sequential, 8 looks, Pocock-like spending)."""
    print(
        "95 % interval of the paired difference: coverage where no more flips are lost than gained / three quarters / all of them are lost, in %"
    )
    for n in (50, 200, 800):
        cells = (
            "/".join(f"{100 * coverage(n, flips, share):.1f}" for share in (0.5, 0.75, 1.0))
            for flips in RATES
        )
        print(
            f"  n = {n:<4}" + "".join(f"  flips {flips:>4.0%}: {cell}" for flips, cell in zip(RATES, cells))
        )
    print("false GO of a variant that is exactly the margin worse, in %: fixed / sequential")
    for n in (50, 200, 800):
        for margin in (0.02, 0.03):
            cells = (
                f"{100 * false_go_rate(n, flips, margin):.1f}/"
                f"{100 * sequential_runs(n, 8, flips, -margin, margin, repeats=RUNS).go:.1f}"
                for flips in RATES[1:]
            )
            shown = "".join(f"  flips {flips:>4.0%}: {cell}" for flips, cell in zip(RATES[1:], cells))
            print(f"  n = {n:<4} margin {margin:.0%}{shown}")
    print("no true loss, 5 % flips: share of the items that a sequential run takes, and how many end in GO")
    for n in (400, 800, 1000, 1200):
        for margin in (0.02, 0.03):
            runs = sequential_runs(n, 8, 0.05, 0.0, margin, repeats=RUNS)
            needed = items_to_decide(margin, 0.05, 0.025, 0.8)
            print(
                f"  n = {n:<5} margin {margin:.0%}  items {runs.items_share:.0%}, GO {runs.go:.0%} "
                f"(a fixed sample takes {needed} for 80 %)"
            )


def _row(name: str, baseline: Callable[[], object], ours: Callable[[], object]) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for body, found in zip((baseline, ours), times, strict=True):
            started = time.perf_counter()
            body()
            found.append(time.perf_counter() - started)
    before, after = (statistics.median(found) for found in times)
    print(f"{name:44} {before * 1000:8.2f}ms {after * 1000:8.2f}ms {after / before:7.2f}")


def _import_hydra() -> None:
    subprocess.run([sys.executable, "-c", "import hydra, pydantic"], check=True)


def _plan() -> None:
    subprocess.run([sys.executable, "-m", "pipeline.cli", "plan"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(run_main(main))
