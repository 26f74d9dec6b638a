"""The mock engine itself: HTTP over asyncio, first-come admission to a KV pool, scripted times and faults.

Apart from `mock_vllm`, which starts it, so that each can be read in one go. What can be scripted is listed in `Script`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support import mock_vllm_wire as wire

Hold = Callable[[int, int], bool]
HOLD_POLL_S = 0.005


@dataclass(frozen=True)
class Script:
    """What the mock does. Times in seconds, per request, counted from admission (not from arrival)."""

    served_name: str = "demo"
    model: str | None = None
    ttft_s: float = 0.0
    itl_s: float = 0.0
    ttft_step_s: float = 0.0  # the n-th streamed request of each `step_period` takes (n - 1) steps longer
    itl_step_s: float = 0.0
    step_period: int = 1
    hold: Hold | None = (
        None  # in process only: an admitted request waits, and its times only start, after this is False;
    )
    # asked with the request's number and that of the last request received, so that a test sets orders, not times
    tokens_per_chunk: int = 1
    seed: int = 0
    score: wire.Scorer | None = None  # in process only: replaces the pseudo-logprobs
    # capacity
    kv_cache_tokens: int = 46_592
    block_size: int = 128
    max_model_len: int = 2048
    max_num_seqs: int = 256
    kv_cache_dtype: str = "auto"
    metrics_tokens: int | None = None  # what /metrics claims instead of kv_cache_tokens
    prefix_caching: bool = True  # off: the counters stay 0, as in vLLM
    prefix_hit_rate: float = 0.0
    preemptions_per_request: int = 0
    # start
    startup_s: float = 0.0
    extra_log: str = ""  # printed with the start-up log
    exit_at_start: str | None = None  # print this and exit 1 before listening
    never_ready: bool = False  # /health answers 200, completions hang
    # faults
    die_at_request: int | None = None  # exit 1 in the middle of this request (1 = the first)
    die_log: str = "RuntimeError: scripted death"
    refuse_after_s: float | None = None  # HTTP 500 after so long, instead of a place in the queue
    error_every: int | None = None  # every n-th request: HTTP 500
    reset_every: int | None = None  # every n-th request: connection reset after the first chunk
    stall_every: int | None = None  # every n-th request: silence after the first chunk
    garbage_every: int | None = None  # every n-th request: an event that is not JSON
    empty_first_chunk: bool = False  # an event with empty text before the first token
    omit_usage: bool = False  # no usage, even when asked for
    # process (as a subprocess only)
    stray_children: int = 0  # children in sessions of their own, as a worker that called setsid
    ignore_sigterm: bool = False


@dataclass
class _Pool:
    """First-come admission to a fixed number of blocks and of running requests."""

    blocks: int
    max_running: int
    used: int = 0
    running: int = 0
    queue: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    @contextlib.asynccontextmanager
    async def hold(self, blocks: int) -> Any:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (blocks, future)
        self.queue.append(entry)
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if entry in self.queue:
                self.queue.remove(entry)
            elif not future.cancelled():
                self._release(blocks)
            raise
        try:
            yield
        finally:
            self._release(blocks)

    def _release(self, blocks: int) -> None:
        self.used -= blocks
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self.queue and self.running < self.max_running and self.used + self.queue[0][0] <= self.blocks:
            blocks, future = self.queue.popleft()
            if future.done():  # its client left, and its handler hasn't run yet
                continue
            self.used += blocks
            self.running += 1
            future.set_result(None)


class MockServer:
    """One mock engine. Made by `start_mock` or by the command line."""

    def __init__(self, script: Script, in_process: bool) -> None:
        self.script = script
        self.served_name = script.served_name
        self.requests: list[dict[str, Any]] = []
        self.arrived_s: list[float] = []
        self.sent_s: list[list[float]] = []
        self.base_url = ""
        self.port = 0
        self._in_process = in_process
        self._tokens = wire.Tokens(script.model)
        self._score = script.score or (lambda prefix, token: wire.pseudo_logprob(prefix, token, script.seed))
        self._pool = _Pool(max(1, script.kv_cache_tokens // script.block_size - 1), script.max_num_seqs)
        self._counters = {
            "prefix_queries": 0,
            "prefix_hits": 0,
            "preemptions": 0,
            "prompt_tokens": 0,
            "generation_tokens": 0,
        }
        self._writers: set[asyncio.StreamWriter] = set()
        self._arrivals: dict[asyncio.StreamWriter, float] = {}
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- lifecycle ---------------------------------------------------------------------------------------------

    async def listen(self, port: int) -> None:
        """Bind 127.0.0.1 (0: any free port) and serve from now on."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """End as a crashed engine does: in process every connection is reset, as a process it exits with 1."""
        if not self._in_process:
            print(self.script.die_log, flush=True)
            os._exit(1)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drop_everything)

    def drop_everything(self) -> None:
        """Close the listener and reset every connection; from the server's own loop."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    # --- HTTP --------------------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self._arrivals[writer] = asyncio.get_running_loop().time()
                method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                length = 0
                for line in head.split(b"\r\n")[1:]:
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":", 1)[1])
                body = await reader.readexactly(length) if length else b""
                answer = asyncio.ensure_future(self._route(writer, method, target.split("?")[0], body))
                while not answer.done():
                    await asyncio.wait({answer}, timeout=0.05)
                    if reader.at_eof():  # the client left: give its blocks back, as the engine does
                        answer.cancel()
                answer.result()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            self._arrivals.pop(writer, None)
            writer.close()

    async def _route(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        script = self.script
        if path in ("/health", "/ping"):
            await self._send(writer, 200, b"", "text/plain")
        elif path == "/version":
            await self._json(writer, 200, {"version": "0.32.0"})
        elif path == "/metrics":
            await self._send(
                writer, 200, self._metrics().encode(), "text/plain; version=1.0.0; charset=utf-8"
            )
        elif path == "/v1/models":
            card = {
                "id": script.served_name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
            }
            card |= {
                "root": script.model or script.served_name,
                "parent": None,
                "max_model_len": script.max_model_len,
            }
            await self._json(writer, 200, {"object": "list", "data": [card]})
        elif method == "POST" and path == "/tokenize":
            ids, _ = self._tokens.split(json.loads(body)["prompt"])
            answer = {
                "count": len(ids),
                "max_model_len": script.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            await self._json(writer, 200, answer)
        elif method == "POST" and path == "/v1/completions":
            await self._completions(writer, json.loads(body))
        else:
            await self._json(writer, 404, {"detail": "Not Found"})

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
        reason = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _json(self, writer: asyncio.StreamWriter, status: int, payload: Any) -> None:
        await self._send(writer, status, json.dumps(payload).encode(), "application/json")

    def _metrics(self) -> str:
        script = self.script
        tokens = script.kv_cache_tokens if script.metrics_tokens is None else script.metrics_tokens
        cache = {
            "block_size": script.block_size,
            "cache_dtype": script.kv_cache_dtype,
            "num_gpu_blocks": tokens // script.block_size,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": tokens / script.max_model_len,
        }
        pool = self._pool
        state = {"running": pool.running, "waiting": len(pool.queue), "kv_usage": pool.used / pool.blocks}
        return wire.metrics_page(script.served_name, {**self._counters, **state}, cache)

    # --- completions -------------------------------------------------------------------------------------------

    async def _completions(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        script = self.script
        self.requests.append(body)
        self.arrived_s.append(self._arrivals[writer])
        self.sent_s.append([])
        number = len(self.requests)
        if script.never_ready:
            await asyncio.sleep(3600)
        if body.get("model") not in (None, script.served_name):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {script.served_name}."
            return await self._json(writer, 404, wire.error_body(message, "NotFoundError", 404, "model"))
        refused = script.refuse_after_s is not None and self._pool.running >= script.max_num_seqs
        if refused:
            await asyncio.sleep(script.refuse_after_s or 0.0)
        if refused or _hits(script.error_every, number):
            return await self._json(
                writer, 500, wire.error_body("scripted error", "InternalServerError", 500)
            )
        prompt = body["prompt"]
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        prompts = [self._tokens.split(one) for one in (prompt if many else [prompt])]
        want = body.get("max_tokens")
        want = 16 if want is None else int(want)
        longest = max(len(ids) for ids, _ in prompts)
        if longest > script.max_model_len - (want > 0):
            body_400 = wire.error_body(
                wire.too_long(script.max_model_len), "BadRequestError", 400, "input_tokens"
            )
            return await self._json(writer, 400, body_400)
        want = min(
            want, script.max_model_len - longest
        )  # vLLM 0.32 cuts max_tokens to what is left, without a word
        if script.die_at_request == number and not self._in_process:
            self.die()
        if body.get("stream"):
            await self._stream(writer, body, number, prompts[0], want)
        else:
            answers = await asyncio.gather(
                *(self._answer(body, number, index, *one, want) for index, one in enumerate(prompts))
            )
            if script.die_at_request == number:
                return self.drop_everything()
            usage = None
            if not script.omit_usage:
                usage = wire.usage_payload(sum(len(ids) for ids, _ in prompts), want * len(prompts))
            payload = wire.completion_body(
                f"cmpl-{number}", int(time.time()), script.served_name, list(answers), usage
            )
            await self._json(writer, 200, payload)

    def _admission(self, ids: list[int], want: int) -> Any:
        if self.script.prefix_caching:
            self._counters["prefix_queries"] += len(ids)
            self._counters["prefix_hits"] += int(len(ids) * self.script.prefix_hit_rate)
        self._counters["preemptions"] += self.script.preemptions_per_request
        self._counters["prompt_tokens"] += len(ids)
        blocks = math.ceil((len(ids) + want) / self.script.block_size)
        return self._pool.hold(min(blocks, self._pool.blocks))

    async def _held(self, number: int) -> bool:
        """Wait while the script holds the request; whether it did."""
        hold, held = self.script.hold, False
        while hold is not None and hold(number, len(self.requests)):
            held = True
            await asyncio.sleep(HOLD_POLL_S)
        return held

    async def _answer(
        self, body: dict[str, Any], number: int, index: int, ids: list[int], strings: list[str], want: int
    ) -> Any:
        """One choice of a non-streaming answer."""
        async with self._admission(ids, want):
            await self._held(number)
            await asyncio.sleep(self.script.ttft_s + self.script.itl_s * max(0, want - 1))
        self._counters["generation_tokens"] += want
        made = wire.generated(strings, want)
        shown = strings + made if body.get("echo") else made
        logprobs = None
        if body.get("logprobs") is not None:
            context = "" if body.get("echo") else "".join(strings)
            logprobs = wire.logprobs_payload(
                shown,
                bool(body.get("echo")),
                body["logprobs"],
                lambda before, token: self._score(context + before, token),
            )
        top = body.get("prompt_logprobs")
        if top is None and body.get(
            "echo"
        ):  # vLLM fills it in to compute the echo's logprobs, and returns it
            top = body.get("logprobs")
        scored = None if top is None else wire.prompt_logprobs_payload(ids, strings, top, self._score)
        asked = bool(body.get("return_token_ids"))
        made_ids = [number % 500 for number in range(len(ids), len(ids) + want)] if asked else None
        return wire.choice_payload(
            index, "".join(shown), logprobs, scored, made_ids, list(ids) if asked else None
        )

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], number: int, prompt: Any, want: int
    ) -> None:
        script = self.script
        ids, strings = prompt
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        base = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": script.served_name,
        }

        async def event(payload: dict[str, Any] | str) -> None:
            data = wire.sse(payload)
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()

        def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
            return {**base, "choices": [wire.delta_payload(text, finish)]}

        options = body.get("stream_options") or {}
        continuous = bool(options.get("continuous_usage_stats")) and not script.omit_usage
        step = (number - 1) % script.step_period
        itl_s = script.itl_s + step * script.itl_step_s

        def counted(payload: dict[str, Any], tokens: int) -> dict[str, Any]:
            if not continuous:
                return payload
            return {**payload, "usage": wire.usage_payload(len(ids), tokens, streaming=True)}

        clock = asyncio.get_running_loop().time
        asked = clock()
        async with self._admission(ids, want):
            # Counted from the request's arrival where it didn't wait: what the mock itself needs isn't scripted.
            begun = clock() if clock() - asked > 0.001 else self._arrivals[writer]
            if script.empty_first_chunk:
                await event(counted(chunk(""), 0))
            if await self._held(number):
                begun = clock()
            due = begun + script.ttft_s + step * script.ttft_step_s
            made = wire.generated(strings, want)
            for start in range(0, want, script.tokens_per_chunk):
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                part = made[start : start + script.tokens_per_chunk]
                last = start + len(part) >= want
                self._counters["generation_tokens"] += len(part)
                self.sent_s[number - 1].append(clock())
                await event(counted(chunk("".join(part), "length" if last else None), start + len(part)))
                due += itl_s * len(part)
                if script.die_at_request == number:
                    return self.drop_everything()
                if _hits(script.reset_every, number):
                    return writer.transport.abort()
                if _hits(script.stall_every, number):
                    await asyncio.sleep(3600)
                if _hits(script.garbage_every, number):
                    await event('{"choices": [{"text": ')
        if options.get("include_usage") and not script.omit_usage:
            await event({**base, "choices": [], "usage": wire.usage_payload(len(ids), want, streaming=True)})
        await event("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _hits(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0
