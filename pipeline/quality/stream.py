"""The fixed token stream through a served endpoint: made once by the reference, scored by every variant, kept in one file each.

Eval prompts, each followed by what the reference says next. The tokens are stored with their hash and sent as ids, so that
every variant scores exactly the same ones and a divergence is never one of tokenization.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.cache import RequestCache
from pipeline.quality.divergence import ScoredPrompt, ScoredStream
from pipeline.quality.evalset import Item
from pipeline.quality.stall import StallGuard

_HASH_KEY, _TOP_K_KEY = b"stream_sha256", b"top_k"


@dataclass(frozen=True)
class StreamPrompt:
    """Tokens to score: an eval prompt of `prompt_tokens` tokens and the reference's continuation."""

    id: str
    cluster: str
    prompt_tokens: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class StreamClient:
    """Where to send requests. `concurrency` counts prompts in flight, of which those that are scored go `prompts_per_request` in a
    request. `check` raises with the engine's cause of death, `progress` gives its counters; `cache` keeps what was answered."""

    base_url: str
    served_name: str
    concurrency: int
    seed: int
    check: Callable[[], None]
    cache: RequestCache | None = None
    progress: Callable[[], object] = lambda: None
    prompts_per_request: int = 1

    def kept(self, path: str, body: dict[str, Any]) -> Any | None:
        """What was answered before, from the cache."""
        return None if self.cache is None else self.cache.get({"path": path, **body})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON. `EngineFailedError` for anything but an answer."""
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy of the user's has no business with 127.0.0.1
                answer = session.post(f"{self.base_url}{path}", json=body)
                answer.raise_for_status()
                return answer.json()
        except (requests.RequestException, ValueError) as error:
            self.check()
            raise EngineFailedError(
                f"a request of the token stream failed ({type(error).__name__}: {str(error)[:200]})"
            ) from None

    def keep(self, path: str, body: dict[str, Any], answer: Any) -> None:
        """Put a checked answer into the cache."""
        if self.cache is not None:
            self.cache.put({"path": path, **body}, answer)


def make_stream(client: StreamClient, items: Sequence[Item], continuation_tokens: int) -> list[StreamPrompt]:
    """The reference's stream: each item's prompt as the engine tokenizes it, and its greedy continuation."""
    return _all(client, lambda item: _continued(client, item, continuation_tokens), items)


def score_stream(client: StreamClient, stream: Sequence[StreamPrompt], top_k: int) -> ScoredStream:
    """Logprobs of every token after the first and the `top_k` likeliest at each position.

    `EngineFailedError` where the engine returns fewer than asked, or something that is no logprob.
    """
    size = client.prompts_per_request
    batches = [stream[start : start + size] for start in range(0, len(stream), size)]
    found = _all(client, lambda batch: _scored(client, batch, top_k), batches, size)
    return ScoredStream(stream_sha256(stream), top_k, tuple(prompt for batch in found for prompt in batch))


def stream_sha256(stream: Sequence[StreamPrompt]) -> str:
    """Identity of a stream: ids and tokens in order."""
    content = json.dumps([[prompt.id, list(prompt.tokens)] for prompt in stream])
    return hashlib.sha256(content.encode()).hexdigest()


def stream_of(scored: ScoredStream) -> list[StreamPrompt]:
    """The tokens of a scored stream, to be scored by another variant."""
    return [StreamPrompt(p.id, p.cluster, p.prompt_tokens, p.tokens) for p in scored.prompts]


def write_stream(path: Path, scored: ScoredStream) -> Path:
    """One row per prompt, as parquet, atomically."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, tuple[Any, list[Any]]] = {
        "id": (pyarrow.string(), [p.id for p in scored.prompts]),
        "cluster": (pyarrow.string(), [p.cluster for p in scored.prompts]),
        "prompt_tokens": (pyarrow.int32(), [p.prompt_tokens for p in scored.prompts]),
        "tokens": (pyarrow.list_(pyarrow.int32()), [p.tokens for p in scored.prompts]),
        "logprobs": (pyarrow.list_(pyarrow.float64()), [p.logprobs for p in scored.prompts]),
        "top_ids": (pyarrow.list_(pyarrow.list_(pyarrow.int32())), [p.top_ids for p in scored.prompts]),
        "top_logprobs": (
            pyarrow.list_(pyarrow.list_(pyarrow.float64())),
            [p.top_logprobs for p in scored.prompts],
        ),
    }
    schema = pyarrow.schema(
        [(name, kind) for name, (kind, _) in columns.items()],
        metadata={_HASH_KEY: scored.sha256.encode(), _TOP_K_KEY: str(scored.top_k).encode()},
    )
    table = pyarrow.table({name: values for name, (_, values) in columns.items()}, schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    parquet.write_table(table, temporary, compression="zstd")
    temporary.replace(path)
    return path


def read_stream(path: Path) -> ScoredStream:
    """What `write_stream` left; `UserInputError` names a file that is missing, foreign or not what its hash says."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        metadata = table.schema.metadata or {}
        sha256, top_k = metadata[_HASH_KEY].decode(), int(metadata[_TOP_K_KEY])
        rows = table.to_pylist()
    except FileNotFoundError:
        raise UserInputError(f"{path}: no such file") from None
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        raise UserInputError(f"{path}: isn't a scored token stream ({error})") from None
    prompts = tuple(
        ScoredPrompt(
            row["id"],
            row["cluster"],
            row["prompt_tokens"],
            tuple(row["tokens"]),
            tuple(row["logprobs"]),
            tuple(map(tuple, row["top_ids"])),
            tuple(map(tuple, row["top_logprobs"])),
        )
        for row in rows
    )
    scored = ScoredStream(sha256, top_k, prompts)
    if stream_sha256(stream_of(scored)) != sha256:
        raise UserInputError(f"{path}: its tokens aren't those of its hash; run the stage quality again")
    return scored


def _all(
    client: StreamClient, work: Callable[[Any], Any], inputs: Sequence[Any], prompts: int = 1
) -> list[Any]:
    """In the inputs' order, so many at a time that `concurrency` prompts are, of which an input has `prompts`. The first failure ends
    it: what hasn't begun is dropped, and what has begun ends with the engine, which whoever started it stops next."""
    guard = StallGuard(client.progress)
    pool = ThreadPoolExecutor(max(2, client.concurrency // prompts))
    try:
        futures = [pool.submit(work, one) for one in inputs]
        left = set(futures)
        while left:
            done, left = wait(left, timeout=guard.interval_s, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                guard.answered()
            if not done:
                guard.check()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _continued(client: StreamClient, item: Item, continuation_tokens: int) -> StreamPrompt:
    body: dict[str, Any] = {
        "model": client.served_name,
        "prompt": item.prompt,
        "max_tokens": continuation_tokens,
        "temperature": 0,
        "seed": client.seed,
        "return_token_ids": True,
    }
    kept = client.kept("/v1/completions", body)
    answer = kept or client.post("/v1/completions", body)
    (choice,) = _choices(answer, 1)
    prompt, made = choice.get("prompt_token_ids"), choice.get("token_ids")
    for name, ids in (("prompt_token_ids", prompt), ("token_ids", made)):
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise EngineFailedError(f"the engine returned no {name} for item {item.id}")
    if kept is None:
        client.keep("/v1/completions", body, answer)
    return StreamPrompt(item.id, item.cluster, len(prompt), (*prompt, *made))


def _scored(client: StreamClient, batch: Sequence[StreamPrompt], top_k: int) -> list[ScoredPrompt]:
    """A request's prompts, scored. They are kept one by one, whatever they were sent with; what is kept isn't sent."""
    bodies: list[dict[str, Any]] = [
        {
            "model": client.served_name,
            "prompt": list(prompt.tokens),
            "max_tokens": 1,
            "temperature": 0,
            "seed": client.seed,
            "prompt_logprobs": top_k,
        }
        for prompt in batch
    ]
    answers = [client.kept("/v1/completions", body) for body in bodies]
    new = [place for place, answer in enumerate(answers) if answer is None]
    if new:
        body = {**bodies[0], "prompt": [bodies[place]["prompt"] for place in new]}
        for place, choice in zip(new, _choices(client.post("/v1/completions", body), len(new)), strict=True):
            answers[place] = {"choices": [{**choice, "index": 0}]}
    found = [
        _score_of(prompt, _choices(answer, 1)[0], top_k)
        for prompt, answer in zip(batch, answers, strict=True)
    ]
    for place in new:
        client.keep("/v1/completions", bodies[place], answers[place])
    return found


def _score_of(prompt: StreamPrompt, choice: dict[str, Any], top_k: int) -> ScoredPrompt:
    found = choice.get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(prompt.tokens):
        count = len(found) if isinstance(found, list) else "no"
        raise EngineFailedError(
            f"the engine returned {count} prompt logprobs for a prompt of {len(prompt.tokens)} tokens ({prompt.id})"
        )
    places = [
        _place(entries, token, top_k, prompt.id)
        for entries, token in zip(found[1:], prompt.tokens[1:], strict=True)
    ]
    return ScoredPrompt(
        prompt.id,
        prompt.cluster,
        prompt.prompt_tokens,
        prompt.tokens,
        tuple(own for own, _, _ in places),
        tuple(ids for _, ids, _ in places),
        tuple(logprobs for _, _, logprobs in places),
    )


def _place(
    entries: Any, token: int, top_k: int, name: str
) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """The token's logprob, and the ids and logprobs of the `top_k` likeliest, of one position."""
    try:
        found = [(entry["logprob"], int(entry["rank"]), int(key)) for key, entry in entries.items()]
        own = entries[str(token)]["logprob"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise EngineFailedError(
            f"the engine's prompt logprobs of {name} lack a token, a rank or a value: {str(entries)[:120]}"
        ) from None
    if len(found) < top_k:
        raise EngineFailedError(
            f"the engine returned {len(found)} of the {top_k} likeliest tokens that were asked for ({name})"
        )
    for value, _, _ in found:
        if type(value) not in (int, float) or not math.isfinite(value) or value > 1e-6:
            raise EngineFailedError(f"the engine returned {value} as a token's logprob ({name})")
    # By logprob, not by rank: the engine ranks a tied token below its equals, and 16-bit logits tie often.
    top = sorted(found, key=lambda entry: (-entry[0], entry[1], entry[2]))[:top_k]
    return float(own), tuple(key for _, _, key in top), tuple(float(value) for value, _, _ in top)


def _choices(answer: Any, prompts: int) -> list[dict[str, Any]]:
    """One choice for each prompt of a request, in the prompts' order."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise EngineFailedError(
            f"the engine's answer to a request of the token stream has no choice: {str(answer)[:200]}"
        )
    by_index = {choice.get("index", 0): choice for choice in choices}
    if len(choices) != prompts or set(by_index) != set(range(prompts)):
        raise EngineFailedError(
            f"the engine answered {len(choices)} of the {prompts} prompts of a request of the token stream"
        )
    return [by_index[place] for place in range(prompts)]
