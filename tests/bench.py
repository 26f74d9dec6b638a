"""`make bench`: performance figures as ratios measured side by side in one run.

Three questions so far. Is the paired comparison fast enough to be simulated thousands of times, next to SciPy's own McNemar-type
test on the same data? And does answering `quantgate plan` cost more than starting the interpreter with its configuration? And what do other planners
say of the same five cases, beside the engine itself?
Runs alternate, and the medians' ratio is printed: on a shared machine only that means something.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.capacity import Card, EngineRules, Geometry, Term, plan_row
from pipeline.quality.intervals import mcnemar_exact, paired_interval
from tests import bench_peers
from tests.bench_load import driver_overhead, search_saving
from tests.support import geometries

ROUNDS = 7
POINTS = 100_000
SMOLLM2 = Geometry.from_config(geometries.SMOLLM2)


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
    card = Card(2**29, 0.9, (Term("overhead", 2**26, 2**25, 2**27),))
    rules = EngineRules(block_size=128)
    for index in range(POINTS):
        plan_row("v", "bf16", "fp8", SMOLLM2, (2**27,), card, rules, 512 + index % 4096)
    print(f"{POINTS:,} plan points in {time.perf_counter() - started:.2f} s\n")
    search_saving()
    driver_overhead()
    bench_peers.main()


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
