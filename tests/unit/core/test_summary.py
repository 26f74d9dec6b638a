"""The last lines of `make test`, made by real runs of pytest: counts, the slowest, and suites that ended badly or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import summary

GOOD = "import time\ndef test_slow(): time.sleep(0.3)\ndef test_quick(): pass\n"
BAD = "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.fixture\ndef broken(): 1 / 0\ndef test_error(broken): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(summary, "FOLDER", tmp_path)
    return tmp_path


def suite(folder: Path, name: str, code: str) -> None:
    """Run `code` as a suite of its own and leave its result as `make test` does."""
    test = folder / f"test_{name}.py"
    test.write_text(code)
    result = [f"--junitxml={folder / name}.xml", "--override-ini", "junit_duration_report=total"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *result]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([*command, test], cwd=folder, env=plain, capture_output=True, check=False)


def test_a_sound_run_ends_with_its_slowest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite(folder, "unit", GOOD)
    assert summary.main(["unit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["unit", "2", "0", "0"]
    assert lines[2].split()[:4] == ["all", "2", "0", "0"]
    assert lines[5].endswith("test_slow") and float(lines[5].split()[0]) >= 0.3
    assert lines[6].endswith("test_quick")


def test_failures_and_errors_count_as_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite(folder, "unit", GOOD)
    suite(folder, "e2e", BAD)
    assert summary.main(["unit", "e2e"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["e2e", "1", "2", "0"]
    assert lines[3].split()[:4] == ["all", "3", "2", "0"]


@pytest.mark.parametrize("left", [None, "", "<testsuites><testsuite "])
def test_a_suite_that_left_no_whole_result_is_no_success(
    folder: Path, capsys: pytest.CaptureFixture[str], left: str | None
) -> None:
    suite(folder, "unit", GOOD)
    if left is not None:
        (folder / "e2e.xml").write_text(left)
    assert summary.main(["unit", "e2e"]) == 1
    assert "e2e          left no result" in capsys.readouterr().out


def test_a_suite_that_only_skipped_proves_nothing(folder: Path) -> None:
    suite(folder, "unit", SKIPPED)
    assert summary.main(["unit"]) == 1
