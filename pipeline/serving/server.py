"""One running vLLM server, from a free port to the last process gone.

    with serve(spec, python, log_path=Path("results/logs/awq/serve.log"), startup_timeout_s=600) as server:
        requests.post(f"{server.base_url}/v1/completions", ...)

`/health` is not readiness: it answers 200 while the first request still kills the engine (vLLM issue 44209, and AWQ on a CPU
without AVX-512). So a server counts as ready when a real completion came back and its process lives on after it. The
processes belong to a guard (`guard.py`), so that nothing stays behind in any ending, our own SIGKILL included.

A start is 9 s on 2 quiet cores: imports 6, weights and the engine core's rest 2, the API server's routes 1. The next engine's imports aren't
begun while this one is measured: on 2 cores they made it 11 % slower in two of three trials.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import requests

from pipeline.errors import EngineFailedError, EnvironmentUnfitError
from pipeline.gpu import engine_environment
from pipeline.results import Gpu, GpuMemory
from pipeline.serving.cards import cards_of, memory_after, memory_before
from pipeline.serving.command import ServeSpec, build_command, build_environment
from pipeline.serving.failures import failure_cause
from pipeline.serving.lease import engine_leases

STOP_GRACE_S = 20.0
GUARD_START_S = 120.0  # an interpreter's start, on a machine that swaps or reads it from a slow disk
CONNECTION_TRIES = 3
LOOK_S = 0.1
"""How often a starting server is looked at. One that doesn't listen yet costs a millisecond."""
DYING_WAIT_S = 30.0
REPOSITORY = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serve(
    spec: ServeSpec,
    python: str | Path,
    log_path: str | Path,
    startup_timeout_s: float,
    *,
    port: int | None = None,
    lease_folder: Path | None = None,
    lease_timeout_s: float = 3600.0,
    nvml: Any = None,
) -> Iterator[Server]:
    """Start the server of `spec` with the serve environment's `python`, yield it ready, and stop it.

    The log is written anew to `log_path`. Raises `EnvironmentUnfitError` (busy port, no such Python, another engine that does
    not end) and `EngineFailedError` (it died, or was not ready within `startup_timeout_s`; cause and log path in the message).
    Only the time from the start of the process counts against `startup_timeout_s`, not the wait for the lease of its cards (of
    the machine, on a CPU). `nvml` stands in for the module pynvml in tests.
    """
    if not Path(python).is_file():
        raise EnvironmentUnfitError(f"{python}: no such Python; `make repro` builds the serve environment")
    gpus = cards_of(spec, nvml)
    with engine_leases([gpu.uuid for gpu in gpus], lease_folder, lease_timeout_s) as leases:
        chosen = _free_port() if port is None else _require_free(port)
        server = Server(spec, build_command(spec, python, chosen), chosen, Path(log_path), gpus)
        try:
            before = memory_before(gpus, nvml)
            environment = build_environment(spec, python=python, startup_timeout_s=startup_timeout_s)
            server._start(environment | engine_environment(gpus), leases)
            server._wait_until_ready(startup_timeout_s)
            server.gpu_memory = memory_after(before, gpus, server.pid, nvml)
            yield server
        finally:
            server._stop()


class Server:
    """A started server. Made by `serve` only."""

    def __init__(
        self, spec: ServeSpec, command: list[str], port: int, log_path: Path, gpus: Sequence[Gpu] = ()
    ) -> None:
        self.spec = spec
        self.command = command
        self.port = port
        self.log_path = log_path
        self.base_url = f"http://127.0.0.1:{port}"
        self.served_name = spec.served_name
        self.gpus = tuple(gpus)
        self.gpu_memory: list[GpuMemory] = []
        self.startup_s = 0.0
        self.stop_grace_s = STOP_GRACE_S
        self.pid = 0
        self.returncode: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._gone = False
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the user's has no business with 127.0.0.1

    # --- for callers ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `EngineFailedError` with the cause if the server is dead or dying. Call it when a request failed."""
        self._read_events(0.0)
        if self.returncode is None and self._health(timeout_s=10.0) != "dying":
            return
        self._wait_for_exit(DYING_WAIT_S)
        self._fail("died")

    def log_text(self) -> str:
        """The engine's log so far."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def metrics_text(self) -> str:
        """The `/metrics` page now; `EngineFailedError` if it can't be had."""
        try:
            answer = self._get("/metrics", 30.0)
            answer.raise_for_status()
        except requests.RequestException as error:
            self.check()
            raise EngineFailedError(f"/metrics can't be read ({error}); its log is {self.log_path}") from None
        return answer.text

    # --- start ------------------------------------------------------------------------------------------------

    def _start(self, environment: dict[str, str], leases: tuple[int, ...]) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "pipeline.serving.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=REPOSITORY,
            pass_fds=leases,
            start_new_session=True,
        )
        request = {"command": self.command, "environment": environment, "log": str(self.log_path.resolve())}
        self._tell(json.dumps(request))
        self._read_events(GUARD_START_S, until="started")
        if self.pid == 0:
            raise EngineFailedError(
                f"the server's guard process didn't start it within {GUARD_START_S:.0f} s"
            )

    def _wait_until_ready(self, timeout_s: float) -> None:
        started = time.monotonic()
        deadline = started + timeout_s
        while self._health(timeout_s=5.0, tries=1) != "healthy":
            self._still_starting(deadline, timeout_s)
        body: dict[str, Any] = {
            "model": self.served_name,
            "prompt": "The quick brown fox",
            "max_tokens": 2,
            "temperature": 0,
        }
        answer = None
        try:
            answer = self._session.post(
                f"{self.base_url}/v1/completions", json=body, timeout=max(1.0, deadline - time.monotonic())
            )
        except requests.Timeout:
            self._still_starting(time.monotonic(), timeout_s)
        except requests.RequestException:
            pass
        # Some engines answer and die right after: look once more a moment later.
        if answer is None or answer.status_code != 200:
            self._wait_for_exit(DYING_WAIT_S)
            self._fail(
                "died at its first request" if self.returncode is not None else "failed its first request"
            )
        self._read_events(0.5)
        if self.returncode is not None or self._health(timeout_s=30.0) != "healthy":
            self._wait_for_exit(DYING_WAIT_S)
            self._fail("died at its first request")
        if not answer.json().get("choices"):
            raise EngineFailedError(
                f"the server's first completion held no choice; its log is {self.log_path}"
            )
        self.startup_s = time.monotonic() - started

    def _still_starting(self, deadline: float, timeout_s: float) -> None:
        """Wait a moment; raise if the server is dead or its time is up."""
        self._read_events(LOOK_S)
        if self.returncode is not None:
            self._fail("didn't start")
        if time.monotonic() >= deadline:
            self._fail(f"wasn't ready within {timeout_s:.0f} s")

    def _health(self, timeout_s: float, tries: int = CONNECTION_TRIES) -> str:
        """'healthy', 'busy' (no answer in time) or 'dying' (an error, or nobody listens)."""
        try:
            answer = self._get("/health", timeout_s, tries)
        except requests.Timeout:
            return "busy"
        except requests.RequestException:
            return "dying"
        return "healthy" if answer.status_code == 200 else "dying"

    def _get(self, path: str, timeout_s: float, tries: int = CONNECTION_TRIES) -> requests.Response:
        """One page. A kept connection that the server closes just as we use it again says nothing of its health: once more."""
        for _ in range(tries - 1):
            with contextlib.suppress(requests.ConnectionError):
                return self._session.get(f"{self.base_url}{path}", timeout=timeout_s)
            if self.returncode is not None:
                break
            time.sleep(0.5)
        return self._session.get(f"{self.base_url}{path}", timeout=timeout_s)

    # --- end --------------------------------------------------------------------------------------------------

    def _fail(self, what: str) -> NoReturn:
        cause = failure_cause(self.log_text(), self.returncode)
        raise EngineFailedError(
            f"the server of {self.served_name} {what}: {cause}; its log is {self.log_path}"
        )

    def _wait_for_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.returncode is None and time.monotonic() < deadline:
            self._read_events(0.2)

    def _stop(self) -> None:
        """End everything and wait for it. Bounded; interrupting it leaves the rest to the guard."""
        self._session.close()
        if self._guard is None:
            return
        self._tell(f"stop {self.stop_grace_s}")
        self._read_events(self.stop_grace_s + 15.0, until="gone")
        assert self._guard.stdin is not None and self._guard.stdout is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        try:
            self._guard.wait(10.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._guard.stdout.close()
        if not self._gone:
            _kill_session(self.pid)

    # --- the guard's pipes ------------------------------------------------------------------------------------

    def _tell(self, line: str) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(line.encode() + b"\n")

    def _read_events(self, wait_s: float, until: str | None = None) -> None:
        """Take in the guard's events for up to `wait_s`; return early at the event `until`, or at any when it is None."""
        assert self._guard is not None and self._guard.stdout is not None
        deadline = time.monotonic() + wait_s
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([self._guard.stdout], [], [], remaining)[0]:
                return
            chunk = self._guard.stdout.read(4096)
            if not chunk:
                if self.returncode is None:
                    self.returncode = -9  # the guard is gone, and takes its engine with it
                time.sleep(min(remaining, 0.1))
                return
            self._buffer += chunk
            *lines, self._buffer = self._buffer.split(b"\n")
            names = [self._apply(json.loads(line)) for line in lines]
            if until is None or until in names:
                return

    def _apply(self, event: dict[str, Any]) -> str:
        name = str(event["event"])
        if name == "started":
            self.pid = event["pid"]
        elif name == "exited":
            self.returncode = event["returncode"]
        elif name == "failed":
            raise EnvironmentUnfitError(f"the server can't be started: {event['why']}")
        elif name == "gone":
            self._gone = event["left"] == 0
            if not self._gone:
                print(f"warning: {event['left']} processes of the server can't be ended", file=sys.stderr)
        return name


def _kill_session(session: int) -> None:
    """Last resort where the guard itself was killed: SIGKILL to every process of the server's session."""
    import os
    import signal

    import psutil

    if session == 0:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session:
                process.send_signal(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _require_free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a closed connection's leftovers don't count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentUnfitError(
                f"port {port} of 127.0.0.1 can't be taken ({error.strerror}); free it or leave the port unset"
            ) from None
    return port
