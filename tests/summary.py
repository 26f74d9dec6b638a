"""The end of `make test`: what each suite said, how long it took, and the ten slowest tests of all.

`python -m tests.summary SUITE …` reads what pytest's own `--junitxml` left of each; a suite that left nothing is said to have left
nothing. Standard library only. Ends with 1 where a suite failed, is missing or ran no test.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(".pytest_cache/suites")
SLOWEST = 10


@dataclass(frozen=True)
class Suite:
    """Counts of tests, and seconds: `wall_s` on the clock, `tests` each test's own with its fixtures."""

    name: str
    passed: int
    failed: int
    skipped: int
    wall_s: float
    tests: tuple[tuple[float, str], ...]

    @property
    def sound(self) -> bool:
        return self.passed > 0 and self.failed == 0


def read_suite(path: Path) -> Suite | None:
    """A suite's file; None where there is none, or it isn't whole, as after a killed pytest."""
    try:
        root = ElementTree.parse(path).getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return None
    found = root.find("testsuite") if root.tag == "testsuites" else root
    if found is None:
        return None
    count = {key: int(found.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    tests = tuple(
        (float(case.get("time", "0")), f"{case.get('classname', '')}::{case.get('name', '')}")
        for case in found.iter("testcase")
    )
    passed = max(0, count["tests"] - failed - count["skipped"])
    return Suite(path.stem, passed, failed, count["skipped"], float(found.get("time", "0")), tests)


def summary(suites: dict[str, Suite | None]) -> str:
    """A line per suite, and one for all; then the slowest tests, wherever they stand."""
    lines = [f"{'suite':12} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    ran = [suite for suite in suites.values() if suite is not None]
    for name, suite in suites.items():
        lines.append(f"{name:12} left no result: it didn't end" if suite is None else _line(name, suite))
    lines.append(_line("all", _together(ran)))
    slowest = sorted((test for suite in ran for test in suite.tests), reverse=True)[:SLOWEST]
    lines += ["", "slowest, fixtures included:", *(f"{seconds:7.1f} s  {name}" for seconds, name in slowest)]
    return "\n".join(lines)


def _together(suites: Sequence[Suite]) -> Suite:
    def total(key: str) -> int:
        return sum(getattr(suite, key) for suite in suites)

    seconds = sum(suite.wall_s for suite in suites)
    return Suite("all", total("passed"), total("failed"), total("skipped"), seconds, ())


def _line(name: str, suite: Suite) -> str:
    return f"{name:12} {suite.passed:7,} {suite.failed:7,} {suite.skipped:8,} {suite.wall_s:8.0f}"


def main(names: list[str]) -> int:
    suites = {name: read_suite(FOLDER / f"{name}.xml") for name in names}
    print(summary(suites))
    return 0 if all(suite is not None and suite.sound for suite in suites.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
