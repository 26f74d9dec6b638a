"""`make bench`: performance figures as ratios measured side by side in one run, and what the statistics promise, counted.

Two questions of speed so far. Is the paired comparison fast enough to be simulated thousands of times, next to SciPy's own McNemar-type
test on the same data? And does answering `quantgate plan` cost more than starting the interpreter with its configuration?
Runs alternate, and the medians' ratio is printed: on a shared machine only that means something.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.capacity import Geometry
from pipeline.capacity.plan import Card, plan_row
from pipeline.quality.intervals import paired_interval
from pipeline.quality.power import items_to_decide
from pipeline.quality.significance import mcnemar_exact
from tests.support.flips import coverage, false_go_rate, sequential_runs

ROUNDS = 7
POINTS = 100_000
RATES = (0.02, 0.05, 0.10, 0.15)
RUNS = 20_000
SMOLLM2 = Geometry("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, True, 8192)


def main() -> None:
    print(f"{'what':44} {'baseline':>10} {'ours':>10} {'ratio':>7}")
    _row("`quantgate plan` against `import hydra`", _import_hydra, _plan)
    differences = [random.Random(1).choice((-1, 0, 0, 0, 1)) for _ in range(800)]
    clusters = [str(index // 3) for index in range(800)]
    _row(
        "paired interval against McNemar's exact test",
        lambda: mcnemar_exact(differences.count(1), differences.count(-1)),
        lambda: paired_interval(differences, clusters, 0.95),
    )
    started = time.perf_counter()
    card = Card(2**29, 0.9, 2**26)
    for index in range(POINTS):
        plan_row("v", "bf16", "fp8", SMOLLM2, 2**27, card, 128, 512 + index % 4096)
    print(f"{POINTS:,} plan points in {time.perf_counter() - started:.2f} s")
    print()
    statistics_tables()


def statistics_tables() -> None:
    """Coverage and false GOs over all outcomes (fixed), by 20,000 runs each (sequential, 8 looks, Pocock-like spending)."""
    print("95 % interval of the paired difference: coverage at no loss / half / all of the flips lost, in %")
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
    main()
