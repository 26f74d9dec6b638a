"""lm-eval through a served endpoint: what is sent, what is read back, and every way an answer can be no answer."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.evalset import load_items, sample_items
from tests.support.mock_vllm import start_mock
from tests.support.patience import PATIENCE_S
from tests.support.scoring_server import scoring_server, token_logprob
from tests.support.zoo_set import YAML, score, write_items, zoo_items


def test_a_model_that_knows_the_answers_scores_full_marks(folder: Path, tokenizer_dir: Path) -> None:
    """Against the mock engine: a token is likely where prompt and right choice go on with it."""
    right = [item["prompt"] + item["choices"][item["answer"]] for item in zoo_items()]

    def knows(prefix: str, token: str) -> float:
        return -0.1 if any(text.startswith(prefix + token) for text in right) else -6.0

    with start_mock(model=str(tokenizer_dir), score=knows) as mock:
        scores = score(folder, tokenizer_dir, mock)
    assert scores.scores.accuracy == 1.0 and len(scores.samples) == 40
    assert [sample.id for sample in scores.samples] == [f"page-{index}" for index in range(40)]
    assert scores.scores.slices["even"].n == 20 and scores.scores.slices["even"].chance == 0.25
    assert scores.scores.format.truncated_prompts == 0
    assert all(
        len({sample.doc_hash, sample.prompt_hash, sample.target_hash}) == 3 for sample in scores.samples
    )
    assert len({sample.doc_hash for sample in scores.samples}) == 40


def test_what_is_sent_is_ids_and_nothing_is_left_to_defaults(folder: Path, tokenizer_dir: Path) -> None:
    with scoring_server() as server:
        score(folder, tokenizer_dir, server)
    assert len(server.requests) == 160
    for request in server.requests:
        assert {key: request[key] for key in ("echo", "logprobs", "max_tokens", "temperature", "model")} == {
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0,
            "model": "demo",
        }
        assert len(request["prompt"]) == 1 and all(isinstance(token, int) for token in request["prompt"][0])


def test_a_score_is_the_sum_over_the_choices_tokens(folder: Path, tokenizer_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    with scoring_server() as server:
        scores = score(folder, tokenizer_dir, server)
    for item, sample in zip(zoo_items(), scores.samples, strict=True):
        context = len(tokenizer.encode(item["prompt"]).ids)
        for choice, value in zip(item["choices"], sample.loglikelihoods, strict=True):
            ids = tokenizer.encode(item["prompt"] + choice).ids
            assert value == pytest.approx(sum(token_logprob(ids, at) for at in range(context, len(ids))))


@pytest.mark.parametrize("concurrency", [2, 16])
def test_answers_dont_depend_on_what_is_in_flight(
    folder: Path, tokenizer_dir: Path, concurrency: int
) -> None:
    with scoring_server() as server:
        reference = score(folder, tokenizer_dir, server)
        other = score(folder, tokenizer_dir, server, concurrency=concurrency)
    assert other.samples == reference.samples


def test_the_sample_is_the_seeds(folder: Path, tokenizer_dir: Path) -> None:
    with scoring_server() as server:
        ids = {
            seed: [s.id for s in score(folder, tokenizer_dir, server, items=10, seed=seed).samples]
            for seed in (3, 4)
        }
    expected = [item.id for item in sample_items(load_items(folder / "items.jsonl"), 10, 3)]
    assert ids[3] == expected and ids[3] != ids[4]


def test_an_edited_item_isnt_answered_from_a_cache(folder: Path, tokenizer_dir: Path) -> None:
    """The same file name with other content: hashes and scores are the new ones."""
    with scoring_server() as server:
        before = score(folder, tokenizer_dir, server)
        edited = zoo_items()
        edited[5]["prompt"] = "Page 5 was torn out. The animal on page 5 is the"
        write_items(folder, edited)
        after = score(folder, tokenizer_dir, server)
    assert [
        s.id for s, t in zip(before.samples, after.samples, strict=True) if s.prompt_hash != t.prompt_hash
    ] == ["page-5"]
    assert before.evalset_sha256 != after.evalset_sha256


# --- the eval set is wrong ------------------------------------------------------------------------------------


def test_prompts_that_would_be_cut_are_refused_before_the_first_request(
    folder: Path, tokenizer_dir: Path
) -> None:
    items = zoo_items()
    items[7]["prompt"] = "A very long page. " * 200 + items[7]["prompt"]
    write_items(folder, items)
    with scoring_server() as server:
        with pytest.raises(UserInputError, match=r"1 eval items don't fit in 255 tokens .*page-7"):
            score(folder, tokenizer_dir, server, max_length=256)
        assert server.requests == []
        scores = score(folder, tokenizer_dir, server, max_length=256, allow_truncated=True)
    assert scores.scores.format.truncated_prompts == 1
    assert max(len(request["prompt"][0]) for request in server.requests) == 255


def test_a_choice_after_two_spaces_is_refused(folder: Path, tokenizer_dir: Path) -> None:
    """lm-eval's default delimiter is a space: a choice that brings its own is scored with two, at chance."""
    (folder / "zoo.yaml").write_text(YAML.replace('target_delimiter: ""\n', ""))
    with (
        scoring_server() as server,
        pytest.raises(UserInputError, match=r"page-\d+.*two spaces.*target_delimiter"),
    ):
        score(folder, tokenizer_dir, server)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("task: zoo", "task: aquarium", "no task 'zoo'.*there: aquarium"),
        ("output_type: multiple_choice", "output_type: loglikelihood", "output_type: 'loglikelihood'"),
        ("output_type: multiple_choice", "output_type: generate_until", "generation_kwargs must give"),
        ("dataset_path: json", "dataset_path: some/hub-set", "dataset_path: 'some/hub-set'"),
        ("    test: items.jsonl", "    train: items.jsonl", "data_files"),
        ("test: items.jsonl", "test: nothing.jsonl", "nothing.jsonl"),
        ('"{{answer}}"', '"0"', r"doc_to_target must give the item's own"),
        ('"{{choices}}"', '["a", "b"]', r"item page-|lm-eval can't run"),
        ('"{{prompt}}"', '"{{prompt"', "zoo.yaml: lm-eval can't run this task"),
        ("task: zoo", "task: [zoo", "can't be read|no task 'zoo'"),
    ],
)
def test_a_wrong_task_yaml_is_the_users_to_mend(
    folder: Path, tokenizer_dir: Path, old: str, new: str, says: str
) -> None:
    assert old in YAML
    (folder / "zoo.yaml").write_text(YAML.replace(old, new, 1))
    with scoring_server() as server, pytest.raises(UserInputError, match=says):
        score(folder, tokenizer_dir, server)


def test_a_missing_folder_and_a_folder_without_tokenizer(
    folder: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    with scoring_server() as server:
        with pytest.raises(UserInputError, match="no such eval set folder"):
            score(tmp_path / "elsewhere", tokenizer_dir, server)
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserInputError, match=r"empty: no tokenizer can be loaded"):
            score(folder, tmp_path / "empty", server)


# --- the engine's answer is wrong -----------------------------------------------------------------------------


def _logprobs(change: Any) -> Any:
    def spoil(body: dict[str, Any]) -> dict[str, Any]:
        body["choices"][0]["logprobs"]["token_logprobs"] = change(
            body["choices"][0]["logprobs"]["token_logprobs"]
        )
        return body

    return spoil


SPOILED = {
    "fewer logprobs": (_logprobs(lambda values: values[:-2]), "logprobs for a prompt of"),
    "more logprobs": (_logprobs(lambda values: [*values, -1.0]), "logprobs for a prompt of"),
    "NaN": (
        _logprobs(lambda values: [*values[:-2], float("nan"), -1.0]),
        "returned nan as a token's logprob",
    ),
    "-inf": (
        _logprobs(lambda values: [*values[:-2], float("-inf"), -1.0]),
        "returned -inf as a token's logprob",
    ),
    "null": (_logprobs(lambda values: [*values[:-2], None, -1.0]), "returned None as a token's logprob"),
    "text": (_logprobs(lambda values: [*values[:-2], "-1", -1.0]), "returned -1 as a token's logprob"),
    "above 1": (_logprobs(lambda values: [*values[:-2], 0.7, -1.0]), "a probability above 1"),
    "no logprobs": (
        lambda body: {"choices": [{"index": 0, "text": "x", "logprobs": None}]},
        "returned no logprobs",
    ),
    "no choices": (lambda body: {"object": "error", "message": "sorry"}, "has no choices"),
    "empty choices": (lambda body: {"choices": []}, "answered 0 of the 1 prompts"),
    "no index": (lambda body: {"choices": [{"text": "x"}]}, "without an index"),
    "a list": (lambda body: [1, 2], "has no choices"),
    "not JSON": (lambda body: b"<html>busy</html>", "a scoring request failed"),
    "cut JSON": (lambda body: b'{"choices": [{"ind', "a scoring request failed"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_answer_that_is_no_score_fails_the_run(folder: Path, tokenizer_dir: Path, name: str) -> None:
    """One bad answer among good ones is enough, and the engine is asked whether it lives."""
    spoil, says = SPOILED[name]
    asked: list[float] = []
    with scoring_server(spoil, every=30) as server, pytest.raises(EngineFailedError, match=says) as caught:
        score(folder, tokenizer_dir, server, check=lambda: asked.append(time.monotonic()))
    assert asked and "lm-eval.log" in str(caught.value)


def test_an_http_error_fails_the_run_in_one_sentence(
    folder: Path, tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All requests in flight fail, one is reported, and no traceback of the others reaches the terminal, then or later."""
    with scoring_server(status=500) as server, pytest.raises(EngineFailedError, match="500"):
        score(folder, tokenizer_dir, server, concurrency=16)
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


def test_an_engine_that_dies_in_the_middle_is_reported_with_its_cause(
    folder: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection is cut at once, as when the process is gone; the cause is the server's to tell."""
    monkeypatch.setattr("pipeline.quality.runner.DYING_WAIT_S", PATIENCE_S)
    dead = threading.Event()

    def check() -> None:
        if dead.is_set():
            raise EngineFailedError("the server died: out of memory; its log is serve.log")

    with start_mock(model=str(tokenizer_dir), ttft_s=0.05) as mock:

        def kill() -> None:
            while len(mock.requests) < 20:
                time.sleep(0.01)
            mock.die()
            time.sleep(0.5)  # the process is found dead only a moment later
            dead.set()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineFailedError, match=r"out of memory; its log is serve\.log"):
            score(folder, tokenizer_dir, mock, check=check)
        killer.join()


def test_an_engine_that_hangs_is_given_up_on(folder: Path, tokenizer_dir: Path) -> None:
    release = threading.Event()
    with (
        scoring_server(delay=lambda: release.wait(PATIENCE_S)) as server,
        pytest.raises(
            EngineFailedError,
            match="made no token for 1 s while answers were awaited; the engine is still alive",
        ),
    ):
        try:
            score(folder, tokenizer_dir, server, stall_timeout_s=1.0)
        finally:
            release.set()


def test_an_engine_that_is_slow_but_works_is_waited_for(folder: Path, tokenizer_dir: Path) -> None:
    """Every answer takes longer than the engine may stand still; its counters move meanwhile."""
    counter = itertools.count()
    write_items(folder, zoo_items(2))
    with scoring_server(delay=lambda: time.sleep(1.5)) as server:
        scores = score(
            folder, tokenizer_dir, server, concurrency=8, stall_timeout_s=0.5, progress=lambda: next(counter)
        )
    assert len(scores.samples) == 2 and next(counter) > 1


def test_logging_and_environment_are_put_back(
    folder: Path, tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("lm_eval")
    before = (logger.handlers[:], logger.propagate, logger.level, dict(os.environ))
    with scoring_server() as server:
        score(folder, tokenizer_dir, server)
    after = (logger.handlers[:], logger.propagate, logger.level, dict(os.environ))
    assert before == after
    captured = capfd.readouterr()
    assert captured.out == "" and "WARNING" not in captured.err
    assert sorted(path.name for path in (folder.parent / "work").iterdir()) == ["items.jsonl", "lm-eval.log"]
    assert (folder.parent / "work" / "lm-eval.log").stat().st_size > 0
