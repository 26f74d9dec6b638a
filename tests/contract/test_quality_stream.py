"""The token stream through a served endpoint: made once, scored by all, and every way an answer can be no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError
from pipeline.quality.cache import RequestCache
from pipeline.quality.divergence import diverge
from pipeline.quality.evalset import Item
from pipeline.quality.stream import (
    StreamClient,
    make_stream,
    read_stream,
    score_stream,
    stream_of,
    write_stream,
)
from tests.support.mock_vllm import start_mock
from tests.support.mock_vllm_wire import Tokens
from tests.support.scoring_server import scoring_server

TOP_K = 4
TEXTS = ["The zoo is open.", "动物园今天开门，老虎在睡觉。", "A tiger and a camel meet."]
ITEMS = [Item(f"i{index}", "s", f"c{index}", text, (" a", " b"), 0) for index, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer that has never seen Chinese: three tokens to a character."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS[::2] * 9, vocab_size=400)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def client(server: Any, cache: RequestCache | None = None, check: Any = lambda: None) -> StreamClient:
    return StreamClient(server.base_url, "demo", 2, 0, check, cache)


def test_texts_of_tokens_add_up_to_the_prompt_in_any_script(tokenizer_dir: Path) -> None:
    tokens = Tokens(str(tokenizer_dir))
    for text in TEXTS:
        ids, strings = tokens.split(text)
        assert "".join(strings) == text and len(ids) == len(strings)
    assert len(tokens.split(TEXTS[1])[0]) > len(TEXTS[1])


def test_a_stream_is_made_by_one_and_scored_alike_by_all(tokenizer_dir: Path, tmp_path: Path) -> None:
    with start_mock(model=str(tokenizer_dir)) as mock:
        stream = make_stream(client(mock), ITEMS, 5)
        reference = score_stream(client(mock), stream, TOP_K)
        kept = read_stream(write_stream(tmp_path / "bf16.logprobs.parquet", reference))
        again = score_stream(client(mock), stream_of(kept), TOP_K)
        asked = [r for r in mock.requests if r.get("prompt_logprobs")]
    assert [len(prompt.tokens) - prompt.prompt_tokens for prompt in stream] == [5, 5, 5]
    assert [prompt.id for prompt in stream] == ["i0", "i1", "i2"]
    assert all(request["prompt_logprobs"] == TOP_K and request["temperature"] == 0 for request in asked)
    assert again == kept == reference
    assert all(len(ids) == TOP_K for prompt in reference.prompts for ids in prompt.top_ids)
    found = diverge(reference, again, 0.95)
    assert (found.kl.value, found.same_top1.value, found.perplexity_ratio.value) == (0.0, 1.0, 1.0)
    with start_mock(model=str(tokenizer_dir), seed=9) as mock:
        other = score_stream(client(mock), stream, TOP_K)
    assert other.sha256 == reference.sha256
    assert diverge(reference, other, 0.95).perplexity_ratio.value != 1.0


def test_a_killed_stream_goes_on_where_it_was(tokenizer_dir: Path, tmp_path: Path) -> None:
    cache = RequestCache(tmp_path, {"variant": "awq"})
    with start_mock(model=str(tokenizer_dir)) as mock:
        stream = make_stream(client(mock, cache), ITEMS, 5)
        first = score_stream(client(mock, cache), stream, TOP_K)
        asked = len(mock.requests)
        assert make_stream(client(mock, cache), ITEMS, 5) == stream
        assert score_stream(client(mock, cache), stream, TOP_K) == first
        assert len(mock.requests) == asked
    cache.close(finished=True)


def place(top: int = TOP_K, **changes: Any) -> dict[str, Any]:
    """One position of two tokens: token 7 and the likeliest others."""
    entries = {str(100 + rank): {"logprob": -0.5 * rank, "rank": rank} for rank in range(1, top + 1)}
    return entries | {"7": {"logprob": -5.0, "rank": 90}} | changes


BAD = {
    "fewer positions": ([None], "returned 1 prompt logprobs for a prompt of 2 tokens"),
    "no logprobs": (None, "returned no prompt logprobs"),
    "fewer tokens than asked": ([None, place(TOP_K - 2)], "returned 3 of the 4 likeliest"),
    "the token missing": (
        [None, {str(n): {"logprob": -1.0, "rank": n} for n in range(1, 6)}],
        "lack a token",
    ),
    "NaN": ([None, place(**{"101": {"logprob": float("nan"), "rank": 1}})], "returned nan"),
    "-inf": ([None, place(**{"7": {"logprob": float("-inf"), "rank": 9}})], "returned -inf"),
    "above 1": ([None, place(**{"101": {"logprob": 0.2, "rank": 1}})], "returned 0.2"),
    "text": ([None, place(**{"101": {"logprob": "-1", "rank": 1}})], "returned -1"),
    "no rank": ([None, place(**{"101": {"logprob": -1.0}})], "lack a token, a rank or a value"),
    "null position": ([None, None], "lack a token, a rank or a value"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_is_no_score_fails_the_run_and_isnt_kept(name: str, tmp_path: Path) -> None:
    answer, says = BAD[name]
    cache = RequestCache(tmp_path, {"variant": "awq"})
    from pipeline.quality.stream import StreamPrompt

    body = {"choices": [{"index": 0, "text": "", "prompt_logprobs": answer}]}
    with scoring_server(lambda _: body) as server:
        for _ in range(2):
            with pytest.raises(EngineFailedError, match=says):
                score_stream(client(server, cache), [StreamPrompt("i0", "c0", 1, (3, 7))], TOP_K)
        assert len(server.requests) == 2
    cache.close(finished=True)


def test_a_server_that_returns_no_token_ids_is_refused() -> None:
    body = {"choices": [{"index": 0, "text": " x", "token_ids": None, "prompt_token_ids": [1, 2]}]}
    with (
        scoring_server(lambda _: body) as server,
        pytest.raises(EngineFailedError, match="no token_ids for item"),
    ):
        make_stream(client(server), ITEMS, 5)


def test_the_cause_is_the_engines_to_tell() -> None:
    def check() -> None:
        raise EngineFailedError("the server died: out of memory")

    with scoring_server(status=500) as server, pytest.raises(EngineFailedError, match="out of memory"):
        make_stream(client(server, check=check), ITEMS, 5)
    with (
        scoring_server(lambda _: b"<html>") as server,
        pytest.raises(EngineFailedError, match="token stream failed"),
    ):
        make_stream(client(server), ITEMS, 5)


def test_tied_tokens_are_taken_by_logprob(tmp_path: Path) -> None:
    """The engine ranks a tied token below its equals: the k-th likeliest may carry rank k + 1."""
    from pipeline.quality.stream import StreamPrompt

    entries = {str(100 + rank): {"logprob": -1.0, "rank": rank} for rank in range(1, TOP_K)}
    entries["7"] = {"logprob": -1.0, "rank": TOP_K + 1}
    body = json.loads(json.dumps({"choices": [{"index": 0, "prompt_logprobs": [None, entries]}]}))
    with scoring_server(lambda _: body) as server:
        found = score_stream(client(server), [StreamPrompt("i0", "c0", 1, (3, 7))], TOP_K)
    assert set(found.prompts[0].top_ids[0]) == {101, 102, 103, 7}
