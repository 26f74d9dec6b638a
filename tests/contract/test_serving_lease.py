"""The machine-wide lease between processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import EnvironmentUnfitError
from pipeline.serving.lease import default_lease_folder, engine_lease

REPOSITORY = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from pipeline.serving.lease import engine_lease
with engine_lease(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "engine.lock")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_second_waits_with_a_message_and_gives_up_by_name(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    messages: list[str] = []
    started = time.monotonic()
    lease = engine_lease(tmp_path / "engine.lock", timeout_s=1.0, notify=messages.append)
    with pytest.raises(EnvironmentUnfitError, match=rf"pid {holder.pid}\b.*after 1 s"), lease:
        pytest.fail("two leases")
    assert time.monotonic() - started > 0.9
    assert messages == [f"waiting for another engine on this machine (pid {holder.pid}) to end"]


def test_killed_holder_leaves_no_lease(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with engine_lease(tmp_path / "engine.lock", timeout_s=0.0) as descriptor:
        assert descriptor > 2


def test_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with engine_lease(tmp_path / "engine.lock", timeout_s=0.0):
            pass


def test_default_folder_does_not_depend_on_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/one")
    first = default_lease_folder()
    monkeypatch.setenv("HOME", "/two")
    assert default_lease_folder() == first
