"""Every way in which a server's life can end, with the mock in the engine's place: nothing may stay behind.

The launcher, the guard, the lease and the readiness check are the real ones; `fake_python` puts the mock where the serve
environment's Python would be.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from pipeline.errors import EngineFailedError, EnvironmentUnfitError
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.server import Server, serve
from tests.support.mock_vllm import fake_python
from tests.support.patience import PATIENCE_S, wait_until, wait_until_empty
from tests.support.processes import alive, is_running

REPOSITORY = Path(__file__).resolve().parents[2]


def spec(name: str = "demo") -> ServeSpec:
    return ServeSpec(
        engine_version=locked_engine()[1],
        model_dir=Path("no-such-model"),
        served_name=name,
        target="cpu",
        max_model_len=512,
        max_num_seqs=32,
        block_size=128,
        kv_cache_memory_bytes=80 * 2**20,
    )


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """`start(**script)`: `serve` with the mock, a lease of the test's own."""

    def begin(startup_timeout_s: float = PATIENCE_S, port: int | None = None, **script: Any) -> Any:
        python = fake_python(tmp_path, **script)
        return serve(
            spec(),
            python,
            tmp_path / "serve.log",
            startup_timeout_s,
            port=port,
            lease_folder=tmp_path / "lease",
        )

    return begin


def marked(folder: Path) -> list[psutil.Process]:
    """Live processes that belong to the server of `folder`: their command line or environment names it."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline()) + " " + process.environ().get("QUANTGATE_TEST_MARK", "")
            if process.pid != os.getpid() and str(folder) in text:
                found += alive([process])
        except psutil.Error:
            continue
    return found


def wait_until_gone(folder: Path) -> None:
    wait_until_empty(lambda: marked(folder))


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the server starts inherits this, children in sessions of their own included; a failed test's are ended."""
    monkeypatch.setenv("QUANTGATE_TEST_MARK", str(tmp_path))
    yield
    for process in marked(tmp_path):
        process.kill()


def ask(server: Server) -> requests.Response:
    body = {"model": server.served_name, "prompt": "one two three", "max_tokens": 4}
    return requests.post(f"{server.base_url}/v1/completions", json=body, timeout=PATIENCE_S)


# --- success ------------------------------------------------------------------------------------------------------


def test_serves_then_leaves_nothing(start: Callable[..., Any], tmp_path: Path) -> None:
    with start() as server:
        assert ask(server).json()["usage"]["completion_tokens"] == 4
        server.check()
        assert server.startup_s > 0
        assert psutil.pid_exists(server.pid)
        assert os.getsid(server.pid) != os.getsid(0), (
            "a Ctrl-C at the terminal must not reach the engine by itself"
        )
        assert "CPU KV cache size: 3,584 tokens" in server.log_text()
        pid = server.pid
    assert not is_running(pid)
    assert marked(tmp_path) == []


def test_engine_temporary_files_are_removed(start: Callable[..., Any]) -> None:
    with start() as server:
        folder = Path(psutil.Process(server.pid).environ()["TMPDIR"])
        assert folder.is_dir()
        (folder / "left").write_text("something")
    assert not folder.exists()


def test_a_long_temporary_folder_leaves_room_for_the_engines_sockets(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with start() as server:
        folder = psutil.Process(server.pid).environ()["TMPDIR"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{uuid.uuid4()}")
    assert os.listdir(long) == [] and not Path(folder).exists()


def test_children_that_left_the_group_are_ended_too(start: Callable[..., Any], tmp_path: Path) -> None:
    with start(stray_children=2, ignore_sigterm=True) as server:
        children = psutil.Process(server.pid).children(recursive=True)
        assert len({os.getsid(child.pid) for child in children} - {server.pid}) == 2, (
            "they are in sessions of their own"
        )
        server.stop_grace_s = 1.0
    assert marked(tmp_path) == []


# --- failures -----------------------------------------------------------------------------------------------------


def test_busy_port_is_named(start: Callable[..., Any], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnfitError, match=rf"port {port} .*in use"), start(port=port):
            pytest.fail("it started")
    assert marked(tmp_path) == []


def test_given_port_is_used(start: Callable[..., Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with start(port=port) as server:
        assert server.base_url.endswith(f":{port}")


def test_missing_python(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentUnfitError, match="no such Python"),
        serve(spec(), tmp_path / "no", tmp_path / "log", 5),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            {"exit_at_start": "ValueError: No available memory for the cache blocks."},
            "didn't start: no memory is left",
        ),
        ({"exit_at_start": ""}, "exit code 1"),
        (
            {"die_at_request": 1, "die_log": "AttributeError: '_C' object has no attribute 'cpu_gemm_wna16'"},
            "died at its first request: the engine lacks the kernel cpu_gemm_wna16",
        ),
        ({"error_every": 1}, "failed its first request"),
    ],
)
def test_failed_start_names_cause_and_log(
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: dict[str, Any],
    message: str,
) -> None:
    if (
        "error_every" in script
    ):  # it lives on, which is waited for; the others' end must be seen on any machine
        monkeypatch.setattr("pipeline.serving.server.DYING_WAIT_S", 2.0)
    with pytest.raises(EngineFailedError, match=re.escape(message)) as caught, start(**script):
        pytest.fail("it started")
    assert str(tmp_path / "serve.log") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert marked(tmp_path) == []


@pytest.mark.parametrize("script", [{"startup_s": 3600.0}, {"never_ready": True}])
def test_start_is_bounded(start: Callable[..., Any], tmp_path: Path, script: dict[str, Any]) -> None:
    with (
        pytest.raises(EngineFailedError, match="wasn't ready within 3 s"),
        start(startup_timeout_s=3.0, **script),
    ):
        pytest.fail("it started")
    assert marked(tmp_path) == []


def test_death_during_the_run_is_found_by_check(start: Callable[..., Any], tmp_path: Path) -> None:
    with start(
        die_at_request=3, die_log="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    ) as server:
        assert ask(server).ok
        server.check()
        with pytest.raises(requests.ConnectionError):
            ask(server)
        with pytest.raises(EngineFailedError, match="the card ran out of memory"):
            server.check()
        with pytest.raises(EngineFailedError, match="died"):
            server.metrics_text()
    assert marked(tmp_path) == []


def test_engine_killed_from_outside_names_the_signal(start: Callable[..., Any]) -> None:
    with start() as server:
        psutil.Process(server.pid).kill()
        with pytest.raises(EngineFailedError, match=r"signal 9"):
            server.check()


def test_error_in_the_body_stops_the_server(start: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), start():
        raise ZeroDivisionError
    assert marked(tmp_path) == []


def test_guard_killed_takes_the_engine_along(start: Callable[..., Any], tmp_path: Path) -> None:
    with start() as server:
        psutil.Process(server.pid).parent().kill()
        with pytest.raises(EngineFailedError):
            wait_until(server.check)
    wait_until_gone(tmp_path)


# --- our own end --------------------------------------------------------------------------------------------------

# A run in the background starts with these two ignored, and whoever starts us may be one.
PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
from pipeline.serving.server import serve
from tests.contract.test_serving_lifecycle import PATIENCE_S, spec
folder = Path(sys.argv[1])
with serve(spec(), folder / "python", folder / "serve.log", PATIENCE_S, lease_folder=folder / "lease") as server:
    print("ready", server.pid, flush=True)
    time.sleep(3600)
"""


def parent(tmp_path: Path, **script: Any) -> tuple[subprocess.Popen[str], int]:
    """A process of ours that holds a ready server, and the server's pid."""
    fake_python(tmp_path, **script)
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    return process, int(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signal_to_us_ends_the_engine(tmp_path: Path, number: int) -> None:
    process, pid = parent(tmp_path, stray_children=1)
    assert len(marked(tmp_path)) >= 3
    process.send_signal(number)
    process.wait(PATIENCE_S)
    wait_until_gone(tmp_path)
    assert not is_running(pid)


def test_kill_of_our_whole_group_ends_the_engine(tmp_path: Path) -> None:
    process, _ = parent(tmp_path, stray_children=1, ignore_sigterm=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    wait_until_gone(tmp_path)


def test_kill_of_our_whole_tree_ends_the_engine(tmp_path: Path) -> None:
    process, _ = parent(tmp_path, stray_children=1)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        member.kill()
    process.wait(PATIENCE_S)
    wait_until_gone(tmp_path)


def test_kill_of_us_and_the_guard_ends_the_engine(tmp_path: Path) -> None:
    """Nobody is left to clean up, so the kernel has to: the engine's parent-death signal."""
    process, pid = parent(tmp_path)
    guard = psutil.Process(pid).parent()
    assert guard is not None
    process.kill()
    guard.kill()
    process.wait(PATIENCE_S)
    wait_until_gone(tmp_path)


def test_lease_is_free_again_only_when_a_killed_owners_engine_is_gone(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    process, pid = parent(tmp_path, ignore_sigterm=True)
    process.kill()
    process.wait(PATIENCE_S)
    with start() as server:  # the guard gives the old engine some seconds of grace, and the lease with them
        assert not is_running(pid)
        assert server.pid != pid
