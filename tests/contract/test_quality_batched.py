"""Several prompts in one request: each answer finds its prompt, each is kept for itself, and one that is missing fails the run."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError
from pipeline.quality.cache import RequestCache
from pipeline.quality.stream import StreamClient, StreamPrompt, score_stream
from tests.support.scoring_server import scoring_server
from tests.support.zoo_set import score, write_items, zoo_items

BATCHED: dict[str, Any] = {"prompts_per_request": 8, "concurrency": 16}
PROMPTS = 160
IDENTITY = {"variant": "awq"}


def reverse(body: dict[str, Any]) -> dict[str, Any]:
    """Choices may come in any order; their index says whose they are."""
    return {**body, "choices": body["choices"][::-1]}


def test_eight_prompts_go_in_a_request_and_score_as_one_by_one(folder: Path, tokenizer_dir: Path) -> None:
    with scoring_server() as server:
        alone = score(folder, tokenizer_dir, server)
        sent = [request["prompt"] for request in server.requests]
        server.requests.clear()
        together = score(folder, tokenizer_dir, server, **BATCHED)
        batches = [request["prompt"] for request in server.requests]
    assert together.samples == alone.samples
    assert [len(batch) for batch in batches] == [8] * (PROMPTS // 8)
    assert sorted(itertools.chain(*batches)) == sorted(itertools.chain(*sent))


def test_the_last_request_has_what_is_left(folder: Path, tokenizer_dir: Path) -> None:
    write_items(folder, zoo_items(3))
    with scoring_server() as server:
        score(folder, tokenizer_dir, server, **BATCHED)
    assert sorted(len(request["prompt"]) for request in server.requests) == [4, 8]


def test_answers_in_another_order_find_their_prompts(folder: Path, tokenizer_dir: Path) -> None:
    with scoring_server() as server:
        expected = score(folder, tokenizer_dir, server, **BATCHED)
    with scoring_server(reverse) as server:
        assert score(folder, tokenizer_dir, server, **BATCHED).samples == expected.samples


def _without_last(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "choices": body["choices"][:-1]}


def _twice(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "choices": [*body["choices"][:-1], body["choices"][0]]}


def _one_null(body: dict[str, Any]) -> dict[str, Any]:
    body["choices"][5]["logprobs"]["token_logprobs"][-2] = None
    return body


SPOILED = {
    "missing": (_without_last, "answered 7 of the 8 prompts"),
    "twice": (_twice, "answered 8 of the 8 prompts"),
    "null": (_one_null, "returned None as a token's logprob"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_one_bad_answer_among_eight_fails_the_run(folder: Path, tokenizer_dir: Path, name: str) -> None:
    """And none of its request is kept."""
    spoil, says = SPOILED[name]
    cache = RequestCache(folder.parent / "kept", IDENTITY)
    with scoring_server(spoil, every=20) as server, pytest.raises(EngineFailedError, match=says):
        score(folder, tokenizer_dir, server, cache=cache, **BATCHED)
    assert len(server.requests) == PROMPTS // 8
    assert kept(cache) == PROMPTS - 8
    cache.close(finished=True)


def test_answers_are_kept_by_prompt_and_only_the_others_are_sent(folder: Path, tokenizer_dir: Path) -> None:
    """A run that was killed with one prompt a request goes on with eight."""
    cache = RequestCache(folder.parent / "kept", IDENTITY)
    with scoring_server() as server:
        whole = score(folder, tokenizer_dir, server)
        server.requests.clear()
        score(folder, tokenizer_dir, server, cache=cache, items=10)
        assert kept(cache) == len(server.requests) == 40
        server.requests.clear()
        assert score(folder, tokenizer_dir, server, cache=cache, **BATCHED).samples == whole.samples
        assert sum(len(request["prompt"]) for request in server.requests) == PROMPTS - 40
        server.requests.clear()
        assert score(folder, tokenizer_dir, server, cache=cache).samples == whole.samples
        assert server.requests == []
    cache.close(finished=True)


def test_a_slow_request_of_eight_is_waited_for_and_a_dead_one_isnt(folder: Path, tokenizer_dir: Path) -> None:
    write_items(folder, zoo_items(4))
    counter = itertools.count()
    with scoring_server(delay=lambda: time.sleep(1.5)) as server:
        slow = score(
            folder, tokenizer_dir, server, stall_timeout_s=0.5, progress=lambda: next(counter), **BATCHED
        )
        assert len(slow.samples) == 4 and len(server.requests) == 2
        with pytest.raises(EngineFailedError, match="made no token for 0 s"):
            score(folder, tokenizer_dir, server, stall_timeout_s=0.4, **BATCHED)


def kept(cache: RequestCache) -> int:
    with sqlite3.connect(cache.path) as database:
        return int(database.execute("SELECT count(*) FROM answers").fetchone()[0])


# --- the token stream -----------------------------------------------------------------------------------------

STREAM = [StreamPrompt(f"i{n}", f"c{n}", 2, (3, 7, 11 + n)) for n in range(5)]
TOP_K = 2


def stream_answer(request: dict[str, Any]) -> dict[str, Any]:
    """Logprobs by which every prompt is told from the others."""
    choices = []
    for index, ids in enumerate(request["prompt"]):
        entries = [
            {str(token): {"logprob": -float(ids[2]), "rank": 9}} | {
                str(900 + rank): {"logprob": -0.1 * rank, "rank": rank} for rank in (1, 2)
            }
            for token in ids[1:]
        ]  # fmt: skip
        choices.append({"index": index, "text": "", "prompt_logprobs": [None, *entries]})
    return {"choices": choices[::-1]}


def client(server: Any, prompts: int, cache: RequestCache | None = None) -> StreamClient:
    return StreamClient(server.base_url, "demo", 4, 0, lambda: None, cache, prompts_per_request=prompts)


def test_a_stream_is_scored_in_batches_and_kept_by_prompt(tmp_path: Path) -> None:
    cache = RequestCache(tmp_path, IDENTITY)
    with scoring_server(stream_answer, whole_request=True) as server:
        alone = score_stream(client(server, 1), STREAM, TOP_K)
        assert [len(request["prompt"]) for request in server.requests] == [1] * 5
        server.requests.clear()
        assert score_stream(client(server, 2, cache), STREAM[:3], TOP_K).prompts == alone.prompts[:3]
        assert sorted(len(request["prompt"]) for request in server.requests) == [1, 2]
        server.requests.clear()
        assert score_stream(client(server, 4, cache), STREAM, TOP_K) == alone
        assert sorted(len(request["prompt"]) for request in server.requests) == [1, 1]
    assert [prompt.logprobs[0] for prompt in alone.prompts] == [-11.0, -12.0, -13.0, -14.0, -15.0]
    cache.close(finished=True)


def test_a_stream_with_a_prompt_unanswered_fails_and_keeps_nothing(tmp_path: Path) -> None:
    def cut(request: dict[str, Any]) -> dict[str, Any]:
        return _without_last(stream_answer(request))

    cache = RequestCache(tmp_path, IDENTITY)
    with (
        scoring_server(cut, whole_request=True) as server,
        pytest.raises(EngineFailedError, match="answered 4 of the 5 prompts"),
    ):
        score_stream(client(server, 8, cache), STREAM, TOP_K)
    assert kept(cache) == 0
    cache.close(finished=True)


def test_a_prompts_key_is_the_one_it_had_alone(tmp_path: Path) -> None:
    """What an earlier run kept of a stream is still found."""
    cache = RequestCache(tmp_path, IDENTITY)
    body = {
        "path": "/v1/completions", "model": "demo", "prompt": [3, 7, 11], "max_tokens": 1, "temperature": 0, "seed": 0,
        "prompt_logprobs": TOP_K,
    }  # fmt: skip
    cache.put(body, json.loads(json.dumps(stream_answer({"prompt": [[3, 7, 11]]}))))
    with scoring_server(stream_answer, whole_request=True) as server:
        score_stream(client(server, 8, cache), STREAM[:1], TOP_K)
        assert server.requests == []
    cache.close(finished=True)
