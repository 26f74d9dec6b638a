"""A completions endpoint that scores prompts of token ids and can spoil its answers, for tests of who reads them.

The mock engine (`mock_vllm`) is a well-behaved one with timing; this one exists for wrong content: `spoil` gets the correct
answer's body and returns what is sent instead.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Server(ThreadingHTTPServer):
    request_queue_size = (
        128  # with the default of 5, streams that connect at once wait a second for the kernel's next try
    )
    daemon_threads = True


Spoil = Callable[[dict[str, Any]], Any]


@dataclass
class ScoringServer:
    """`requests` are the bodies received; `answer(ids)` gives the logprob of each prompt token but the first."""

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def scoring_server(
    spoil: Spoil | None = None,
    every: int = 1,
    status: int = 200,
    delay: Callable[[], None] | None = None,
    answers: Callable[[str], tuple[str, str]] | None = None,
    tokenizer: Path | None = None,
    whole_request: bool = False,
) -> Iterator[ScoringServer]:
    """Answer on a free port; `spoil` (or `status`) applies to every `every`-th request, `delay` runs before each. With
    `whole_request` it is the request, not the right answer, that `spoil` gets.

    With `answers` (the prompt's text -> generated text and finish reason) it generates; `tokenizer` is the folder of the
    tokenizer that turns ids back into text.
    """
    server = ScoringServer()
    decode = _decoder(tokenizer)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.requests.append(request)
                turn = len(server.requests)
            if delay is not None:
                delay()
            spoiled = turn % every == 0
            text_prompt = isinstance(request["prompt"], str)  # only `spoil` knows what to say to one
            body: Any = {} if text_prompt else completion(request["prompt"])
            if answers is not None:
                text, reason = answers(decode(request["prompt"][0]))
                body = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
            if spoiled and spoil is not None:
                body = spoil(request if whole_request else body)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            with contextlib.suppress(OSError):
                self.send_response(status if spoiled else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

    http = _Server(("127.0.0.1", 0), Handler)
    server.base_url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)


def _decoder(tokenizer: Path | None) -> Callable[[list[int]], str]:
    if tokenizer is None:
        return str
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return lambda ids: str(loaded.decode(ids))


def completion(prompt: list[list[int]] | list[int]) -> dict[str, Any]:
    """The echoed prompts' logprobs and one generated token each, as vLLM answers echo, logprobs=1, max_tokens=1."""
    prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    return {"object": "text_completion", "choices": [_choice(i, ids) for i, ids in enumerate(prompts)]}  # type: ignore[arg-type]


def _choice(index: int, ids: list[int]) -> dict[str, Any]:
    values: list[float | None] = [None] + [token_logprob(ids, at) for at in range(1, len(ids))] + [-0.5]
    tops = [None if value is None else {"x": value} for value in values]
    return {"index": index, "text": "", "logprobs": {"token_logprobs": values, "top_logprobs": tops}}


def token_logprob(ids: list[int], at: int) -> float:
    """A deterministic value in (-8, 0) of the token at `at` given those before it."""
    return -((sum(ids[:at]) * 31 + ids[at] * 17) % 800 + 1) / 101
