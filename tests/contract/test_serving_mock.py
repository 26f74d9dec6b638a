"""The mock against recordings of the real engine, and its own scripted behaviour.

What other tests conclude from the mock is worth as much as the mock's likeness: same keys, same types, same status codes, same
order of events as vLLM 0.32.0 sent (`recorded/wire-0.32.json`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pipeline.serving.signals import COUNTS, MetricsSnapshot, parse_metrics
from tests.support.mock_vllm import MockServer, start_mock
from tests.support.patience import PATIENCE_S, wait_until

RECORDED = Path(__file__).parent / "recorded"
WIRE = json.loads((RECORDED / "wire-0.32.json").read_text(encoding="utf-8"))
# The real engine's own decoration, which no client of ours may rely on.
IGNORED = {"permission"}


def shape(value: Any) -> Any:
    """Keys and types of a JSON value; lists by the union of what they hold, numbers as one type."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in IGNORED}
    if isinstance(value, list):
        return ["list", sorted({json.dumps(shape(item), sort_keys=True) for item in value})]
    if isinstance(value, bool) or value is None:
        return repr(value)
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def call(mock: MockServer, recording: dict[str, Any]) -> requests.Response:
    url = mock.base_url + recording["path"]
    return (
        requests.get(url) if recording["request"] is None else requests.post(url, json=recording["request"])
    )


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.strip()]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["models", "version", "tokenize", "plain", "bad_model", "not_found"])
def test_same_shape_as_the_engine(name: str) -> None:
    with start_mock(max_model_len=512) as mock:
        answer = call(mock, WIRE[name])
    assert answer.status_code == WIRE[name]["status"]
    assert answer.headers["content-type"] == WIRE[name]["content_type"]
    assert shape(answer.json()) == shape(WIRE[name]["body"])


@pytest.mark.parametrize("name", ["logprobs", "echo", "echo_ids", "plogprobs"])
def test_same_logprobs_as_the_engine_in_form(name: str) -> None:
    """Token texts and ids differ, so keyed objects are compared by their rules."""
    with start_mock(max_model_len=512) as mock:
        mine, real = call(mock, WIRE[name]).json(), WIRE[name]["body"]
    assert shape(mine["usage"]) == shape(real["usage"])
    assert len(mine["choices"]) == len(real["choices"])
    for ours, theirs in zip(mine["choices"], real["choices"], strict=True):
        assert set(ours) == set(theirs)
        assert (ours["logprobs"] is None) == (theirs["logprobs"] is None)
        assert (ours["prompt_logprobs"] is None) == (theirs["prompt_logprobs"] is None)
        for choice in (ours, theirs):
            check_logprobs(choice)


def check_logprobs(choice: dict[str, Any]) -> None:
    """The rules that a client may rely on; both the recording and the mock must pass."""
    logprobs, prompt = choice["logprobs"], choice["prompt_logprobs"]
    if logprobs is not None:
        tokens = logprobs["tokens"]
        assert "".join(tokens) == choice["text"]
        assert logprobs["text_offset"] == [len("".join(tokens[:index])) for index in range(len(tokens))]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(tokens)
        for token, value, top in zip(
            tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            if value is None:
                assert top is None
            else:
                assert value <= 0.0
                assert top[token] == value
                assert max(top.values()) >= value
    if prompt is not None:
        assert prompt[0] is None
        for entry in prompt[1:]:
            ranks = {item["rank"] for item in entry.values()}
            assert 1 in ranks
            assert all(set(item) == {"logprob", "rank", "decoded_token"} for item in entry.values())


@pytest.mark.parametrize("name", ["stream", "stream_nousage"])
def test_same_stream_as_the_engine(name: str) -> None:
    with start_mock(max_model_len=512) as mock:
        answer = call(mock, WIRE[name])
    mine, real = events(answer.text), events(WIRE[name]["body"])
    assert answer.headers["content-type"] == WIRE[name]["content_type"]
    assert len(mine) == len(real)
    assert mine[-1] == real[-1] == "[DONE]"
    drop = {"system_fingerprint"}
    assert [
        shape({key: value for key, value in event.items() if key not in drop}) for event in mine[:-1]
    ] == [shape({key: value for key, value in event.items() if key not in drop}) for event in real[:-1]]
    assert [event["choices"][0]["finish_reason"] for event in mine[:-1] if event["choices"]] == [
        event["choices"][0]["finish_reason"] for event in real[:-1] if event["choices"]
    ]


def test_too_long_prompts_are_refused_with_the_engines_words() -> None:
    with start_mock(max_model_len=512) as mock:
        body = {"model": "demo", "prompt": " hello" * 600, "max_tokens": 4}
        answer = requests.post(f"{mock.base_url}/v1/completions", json=body)
    assert answer.status_code == WIRE["too_long"]["status"] == 400
    assert answer.json() == WIRE["too_long"]["body"]


def test_max_tokens_is_cut_to_the_room_left_as_the_engine_does() -> None:
    real = WIRE["too_long2"]
    assert (real["status"], real["body"]["usage"]["total_tokens"]) == (200, 512)
    with start_mock(max_model_len=512) as mock:
        body = {"model": "demo", "prompt": " hello" * 511, "max_tokens": 20}
        usage = requests.post(f"{mock.base_url}/v1/completions", json=body).json()["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (1, 512)


def test_metrics_have_the_engines_names_and_labels() -> None:
    real = (RECORDED / "metrics-0.32-under-load.txt").read_text(encoding="utf-8")
    with start_mock(kv_cache_tokens=3584, max_model_len=512) as mock:
        mine = requests.get(f"{mock.base_url}/metrics").text
    for name in [*COUNTS.values(), "vllm:kv_cache_usage_perc"]:
        assert f'{name}{{engine="0",model_name="demo"}}' in real
        assert f'{name}{{engine="0",model_name="demo"}}' in mine
    ours, theirs = parse_metrics(mine), parse_metrics(real)
    assert ours.kv_cache_size_tokens == theirs.kv_cache_size_tokens
    assert ours.kv_cache_max_concurrency == theirs.kv_cache_max_concurrency
    assert (ours.num_gpu_blocks, ours.block_size) == (theirs.num_gpu_blocks, theirs.block_size)


# --- scripted behaviour -------------------------------------------------------------------------------------------


CLOCK_S = 0.001


def events_of(
    mock: MockServer, tokens: int = 6, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[float, str]]:
    """(seconds since the request was sent, event) of one streamed completion, as they come."""
    body = {"model": "demo", "prompt": "one two", "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    answer = requests.post(f"{mock.base_url}/v1/completions", json=body, stream=True, timeout=timeout_s)
    answer.raise_for_status()
    for line in answer.iter_lines(chunk_size=1):
        if line:
            yield time.perf_counter() - started, line.decode().removeprefix("data: ")


def stream(mock: MockServer, tokens: int = 6, timeout_s: float = PATIENCE_S) -> list[tuple[float, str]]:
    """The same, whole."""
    return list(events_of(mock, tokens, timeout_s))


@pytest.mark.parametrize(
    ("script", "scripted_s"),
    [
        ({"ttft_s": 0.2, "itl_s": 0.05}, [0.2, 0.25, 0.3, 0.35, 0.4, 0.45]),
        ({"ttft_s": 0.1, "itl_s": 0.05, "tokens_per_chunk": 3}, [0.1, 0.25]),
    ],
)
def test_no_token_is_sent_before_its_time_or_seen_before_it_is_sent(
    script: dict[str, Any], scripted_s: list[float]
) -> None:
    """How late they are is the machine's; `make bench` holds it to 1 ms + 1 %."""
    with start_mock(**script) as mock:
        times = [when for when, event in stream(mock) if '"text"' in event]
        sent_s = [sent - mock.arrived_s[0] for sent in mock.sent_s[0]]
    assert len(times) == len(sent_s) == len(scripted_s)
    for seen, sent, scripted in zip(times, sent_s, scripted_s, strict=True):
        assert seen > sent - CLOCK_S > scripted - 2 * CLOCK_S


def test_a_held_request_waits_until_it_may_go_on() -> None:
    """Its empty first chunk comes before, its first token and its time after."""
    go_on = threading.Event()
    with start_mock(
        ttft_s=0.1, empty_first_chunk=True, hold=lambda number, received: not go_on.is_set()
    ) as mock:
        coming = events_of(mock)
        _, event = next(coming)
        assert json.loads(event)["choices"][0]["text"] == ""
        assert mock.sent_s == [[]]
        went_on = time.monotonic()
        go_on.set()
        assert len([event for _, event in coming if '"text"' in event]) == 6
    assert mock.sent_s[0][0] > went_on + 0.1 - CLOCK_S


def test_missing_usage() -> None:
    with start_mock(omit_usage=True) as mock:
        assert not any("usage" in event for _, event in stream(mock))


@pytest.mark.parametrize("fault", ["error_every", "reset_every", "stall_every", "garbage_every"])
def test_faults_hit_every_nth_request_and_no_other(fault: str) -> None:
    outcomes = []
    with start_mock(**{fault: 2}) as mock:
        for _ in range(4):
            # Only a stream that is to stall is waited for so shortly that a slow machine could take it for one.
            stalls = fault == "stall_every" and len(outcomes) % 2 == 1
            try:
                text = [event for _, event in stream(mock, timeout_s=1.0 if stalls else PATIENCE_S)]
                outcomes.append("bad" if any(event.endswith('"text": ') for event in text) else text[-1])
            except requests.RequestException:
                outcomes.append("bad")
    assert outcomes == ["[DONE]", "bad", "[DONE]", "bad"]


def metrics_of(mock: MockServer) -> MetricsSnapshot:
    return parse_metrics(requests.get(f"{mock.base_url}/metrics").text)


def test_a_client_that_leaves_gives_its_blocks_back() -> None:
    with start_mock(stall_every=1) as mock:
        with pytest.raises(requests.RequestException):
            stream(mock, timeout_s=0.3)
        wait_until(lambda: mock.requests and metrics_of(mock).running == 0)
        assert metrics_of(mock).kv_usage == 0.0


def test_pool_limits_what_runs_and_the_rest_waits_in_order() -> None:
    """29 usable blocks of 128 hold 7 requests of 4 blocks. Nobody is answered before all twelve have been counted."""
    counted = threading.Event()
    begun: list[int] = []

    def hold(number: int, received: int) -> bool:
        if number not in begun:
            begun.append(number)
        return not counted.is_set()

    with start_mock(kv_cache_tokens=30 * 128, max_model_len=512, hold=hold) as mock:
        body = {"model": "demo", "prompt": " w" * 400, "max_tokens": 100}
        url = f"{mock.base_url}/v1/completions"
        threads = [
            threading.Thread(target=requests.post, args=(url,), kwargs={"json": body}) for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(mock.requests) == 12)
        metrics = metrics_of(mock)
        assert begun == [1, 2, 3, 4, 5, 6, 7]
        counted.set()
        for thread in threads:
            thread.join()
    assert (metrics.running, metrics.waiting) == (7, 5)
    assert metrics.kv_usage == pytest.approx(28 / 29)
    assert begun == list(range(1, 13))


def test_scores_are_a_function_of_the_text_and_the_seed() -> None:
    body = {
        "model": "demo",
        "prompt": "The capital of France is",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }

    def score(**script: Any) -> list[float]:
        with start_mock(**script) as mock:
            answer = requests.post(f"{mock.base_url}/v1/completions", json=body).json()
        return list(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])

    assert score() == score()
    assert score() != score(seed=1)
    assert score(score=lambda prefix, token: -float(len(prefix))) == [-3.0, -11.0, -14.0, -21.0]


def test_die_resets_every_connection() -> None:
    with start_mock(ttft_s=5.0) as mock:
        threading.Timer(0.2, mock.die).start()
        with pytest.raises(requests.RequestException):
            stream(mock)
        with pytest.raises(requests.RequestException):
            requests.get(f"{mock.base_url}/health", timeout=1)
