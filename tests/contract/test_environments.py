"""Builds by the real uv: of packages in a folder that pip is told of, without a network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.environments import build
from pipeline.errors import EnvironmentUnfitError, run_main
from tests.support.tiny_packages import write_source, write_wheel

ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import sys
from pathlib import Path
from pipeline.environments import build
tool, build.LOCKS, build.ROOT, mark = map(Path, sys.argv[1:])
build.uv = lambda: tool
build.ENVIRONMENTS["serve"] = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(2)"
build.ensure("serve")
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Cache, clone, packages and locks of our own; the uv is everybody's. The user's pip has a constraint that fits nothing."""
    tool = build.uv()
    links, locks = tmp_path / "links", tmp_path / "locks"
    locks.mkdir()
    right = write_wheel(links, "tinya", "1.0")
    write_wheel(links, "tinya", "1.0+cpu")  # what `==1.0` also lets in
    (locks / "serve.txt").write_text(f"tinya==1.0 \\\n    {right}\n")
    (locks / "tools.txt").write_text(f"tinytool==1.0 {write_wheel(links, 'tinytool', '1.0')}\n")
    (tmp_path / "constraints.txt").write_text("tinya<1\ntinytool<1\n")
    monkeypatch.setattr(build, "uv", lambda: tool)
    monkeypatch.setattr(build, "LOCKS", locks)
    monkeypatch.setattr(build, "ROOT", tmp_path / "clone")
    monkeypatch.setitem(build.ENVIRONMENTS, "serve", "import tinya")
    for name, value in {
        "XDG_CACHE_HOME": tmp_path / "cache",
        "UV_CACHE_DIR": tmp_path / "uv",
        "PIP_FIND_LINKS": links,
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": tmp_path / "constraints.txt",
        "PYTHONDONTWRITEBYTECODE": "1",
    }.items():
        monkeypatch.setenv(name, str(value))
    yield tmp_path


def site(folder: Path) -> Path:
    (found,) = (folder / "lib").glob("python3.*/site-packages")
    return found


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What `make environments` ends with, and that it is one sentence."""
    assert run_main(lambda: int(build.ensure("serve") is None)) == EnvironmentUnfitError.exit_code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_an_environment_is_what_its_lock_says(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build.ensure("serve")
    assert re.search(r"building serve: 1 packages.*\nbuilt serve in \d+ s", capsys.readouterr().err)
    module = site(folder) / "tinya.py"
    assert "VERSION = '1.0'" in module.read_text()
    assert module.stat().st_nlink > 1, "linked to uv's cache, not copied"
    assert list(site(folder).glob("__pycache__/tinya.*.pyc")), "what was imported is compiled"
    assert not list(site(folder).glob("pip*")), "nothing that isn't in the lock"
    started = time.monotonic()
    assert build.ensure("serve") == folder
    assert time.monotonic() - started < 0.5
    assert capsys.readouterr().err == ""


def test_a_package_that_was_changed_is_refused_in_one_sentence(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(scratch / "links", "tinya", "1.0", "print('something else')\n")
    sentence = said(capsys)
    assert (
        "environment serve couldn't be built: the file that was found for tinya==1.0 isn't the one"
        in sentence
    )
    assert ".log)" in sentence
    assert not build.is_complete(build.environment_folder("serve"))
    write_wheel(scratch / "links", "tinya", "1.0")
    assert build.is_complete(build.ensure("serve"))


def test_a_hash_that_was_changed_in_the_lock_is_refused(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scratch / "locks/serve.txt").write_text(f"tinya==1.0 --hash=sha256:{'0' * 64}\n")
    assert "in the lock 000000000000…" in said(capsys)
    (scratch / "locks/serve.txt").write_text("tinya==1.0\n")
    assert "must have a hash" in said(capsys)


def test_a_package_without_a_wheel_is_built_with_what_the_tools_lock_names(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links, lock = scratch / "links", scratch / "locks/serve.txt"
    lock.write_text(f"{lock.read_text()}tinysource==2.0 {write_source(links, 'tinysource', '2.0')}\n")
    write_wheel(links, "tinytool", "1.0", "print('something else')\n")
    assert "found for tinytool==1.0 isn't the one that was locked" in said(capsys)
    write_wheel(links, "tinytool", "1.0")
    assert (site(build.ensure("serve")) / "tinysource.py").is_file()


def test_a_package_that_isnt_to_be_had_is_named(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (scratch / "locks/serve.txt").write_text(f"nowhere==1.0 --hash=sha256:{'0' * 64}\n")
    assert "nowhere was not found" in said(capsys)


def test_a_cache_on_another_disk_is_copied_from(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == scratch.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as cache:
        monkeypatch.setenv("UV_CACHE_DIR", cache)
        module = site(build.ensure("serve")) / "tinya.py"
        assert module.stat().st_nlink == 1 and "VERSION = '1.0'" in module.read_text()


def test_a_killed_build_is_done_again(scratch: Path) -> None:
    """And not before what it left running is gone."""
    told = [build.uv(), build.LOCKS, build.ROOT, scratch / "mark"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *told], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (scratch / "mark").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    folder = build.environment_folder("serve")
    assert not build.is_complete(folder)
    marked = time.monotonic()
    (folder / "half").write_text("")
    assert build.is_complete(build.ensure("serve")) and not (folder / "half").exists()
    assert time.monotonic() - marked > 1, "the killed build's child still held the lock"


def test_a_single_package_is_unpacked_without_an_environment(scratch: Path) -> None:
    build.unpack(["tinya===1.0"], scratch / "content")
    assert "VERSION = '1.0'" in (scratch / "content/tinya.py").read_text()
    with pytest.raises(EnvironmentUnfitError, match="nowhere was not found"):
        build.unpack(["nowhere==1"], scratch / "other")
