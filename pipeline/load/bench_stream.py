"""One streamed completion, timed chunk by chunk. Runs in the serve environment, inside vLLM's load generator.

In place of the generator's own request function, which counts chunks where it should count tokens (a first chunk without
a token is its TTFT), guesses a token count where the server sent none, and leaves the latency of a failed request at
zero. The server is asked for its running token count with every chunk (`continuous_usage_stats`), so that it's known of each
chunk how many tokens it carries, also where its text is empty (a special token, half a character).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

NO_USAGE = "the stream ended without the server's token counts (usage)"
NO_TOKEN = "the stream ended without a token"
MAX_ERROR_CHARACTERS = 300


@dataclass
class Progress:
    """What has been seen of one request so far. Times are `time.perf_counter()`."""

    start: float
    token_times: list[float] = field(default_factory=list)
    """One per chunk that carries at least one token."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Tokens in each of them; shorter than `token_times` where the server didn't say."""
    counted: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None

    def take(self, data: dict[str, Any], now: float) -> None:
        """One event of the stream. Raises `ValueError` with the server's words where it is an error."""
        if error := data.get("error"):
            raise ValueError(str(error.get("message", error) if isinstance(error, dict) else error))
        usage = data.get("usage")
        choices = data.get("choices")
        if not choices:
            if usage:
                self.input_tokens = usage.get("prompt_tokens")
                self.output_tokens = usage.get("completion_tokens")
            return
        if usage:
            tokens = usage["completion_tokens"] - self.counted
            if tokens > 0:
                self.counted += tokens
                self.token_times.append(now)
                self.chunk_tokens.append(tokens)
        elif choices[0].get("text"):
            self.token_times.append(now)

    def failure(self) -> str | None:
        """Why a stream that came to its end is no completed request; None when it is one."""
        if not self.token_times:
            return NO_TOKEN
        return None if self.output_tokens and self.input_tokens is not None else NO_USAGE


async def stream(progress: Progress, session: Any, url: str, body: dict[str, Any]) -> str | None:
    """Send one request and follow it to its end; why it failed, or None. `progress` keeps what was seen either way."""
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                return f"HTTP {response.status} {response.reason or ''}".strip()
            buffer = b""
            async for part in response.content.iter_any():
                now = time.perf_counter()
                *events, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    _take_event(progress, event, now)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[-1][:MAX_ERROR_CHARACTERS]
    return progress.failure()


def _take_event(progress: Progress, event: bytes, now: float) -> None:
    """A server-sent event; comments (pings) and the end mark hold nothing."""
    content = event.strip()
    if not content.startswith(b"data:"):
        return
    content = content[5:].strip()
    if content != b"[DONE]":
        progress.take(json.loads(content), now)
