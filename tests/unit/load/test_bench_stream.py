"""What a stream's events say: which chunks carry tokens, when the first came, and what is no completed request."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.load.bench_stream import NO_TOKEN, NO_USAGE, Progress


def chunk(text: str, total: int | None = None) -> dict[str, Any]:
    usage = {} if total is None else {"usage": {"prompt_tokens": 3, "completion_tokens": total}}
    return {"choices": [{"text": text}], **usage}


END = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}


def followed(*events: dict[str, Any]) -> Progress:
    progress = Progress(start=0.0)
    for second, event in enumerate(events, start=1):
        progress.take(event, float(second))
    return progress


def test_tokens_are_counted_by_the_server() -> None:
    progress = followed(chunk(" a", 1), chunk(" b c", 3), END)
    assert (progress.token_times, progress.chunk_tokens) == ([1.0, 2.0], [1, 2])
    assert (progress.input_tokens, progress.output_tokens, progress.failure()) == (3, 3, None)


@pytest.mark.parametrize("total", [0, None])
def test_an_empty_first_chunk_is_no_token(total: int | None) -> None:
    counts = (None, None) if total is None else (1, 3)
    progress = followed(chunk("", total), chunk(" a", counts[0]), chunk(" b c", counts[1]), END)
    assert progress.token_times == [2.0, 3.0]
    assert progress.failure() is None


def test_a_token_without_text_is_a_token() -> None:
    """A special token that isn't shown, or half a character: the server counts it, so its time is a token's."""
    progress = followed(chunk("", 1), chunk("", 2), chunk(" é", 3), END)
    assert (progress.token_times, progress.chunk_tokens) == ([1.0, 2.0, 3.0], [1, 1, 1])


def test_incomplete_streams_are_failures() -> None:
    assert followed(END).failure() == NO_TOKEN
    assert followed(chunk(" a", 1)).failure() == NO_USAGE
    with pytest.raises(ValueError, match="engine died"):
        followed({"error": {"message": "engine died", "code": 500}})
