"""lm-eval through a served endpoint: what is sent, what is read back, and every way an answer can be no answer."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.cache import RequestCache
from pipeline.quality.evalset import load_items, sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, Scores, run_quality
from tests.support.mock_vllm import start_mock
from tests.support.scoring_server import scoring_server, token_logprob

ANIMALS = ["horse", "tiger", "eagle", "whale", "camel", "sheep", "snake", "mouse"]
YAML = """\
task: zoo
dataset_path: json
dataset_kwargs:
  data_files:
    test: items.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer trained on next to nothing: real merges, no download."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [_prompt(i) for i in range(40)] + [f" {a}" for a in ANIMALS], vocab_size=600
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _prompt(index: int) -> str:
    return f"Page {index} of the zoo's book shows the {ANIMALS[index % 8]}. The animal on page {index} is the"


def _items(count: int = 40) -> list[dict[str, Any]]:
    items = []
    for index in range(count):
        choices = [f" {ANIMALS[(index + offset) % 8]}" for offset in range(4)]
        answer = index % 4
        choices[0], choices[answer] = choices[answer], choices[0]
        items.append(
            {
                "id": f"page-{index}",
                "slice": "even" if index % 2 == 0 else "odd",
                "cluster": f"c{index // 2}",
                "prompt": _prompt(index),
                "choices": choices,
                "answer": answer,
                "note": "a field of the team's own",
            }
        )
    return items


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An eval set as a team would bring it."""
    target = tmp_path / "zoo"
    target.mkdir()
    write_items(target, _items())
    (target / "zoo.yaml").write_text(YAML)
    return target


def write_items(folder: Path, items: list[dict[str, Any]]) -> None:
    (folder / "items.jsonl").write_text(
        "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    )


def score(folder: Path, tokenizer: Path, server: Any, **changes: Any) -> Scores:
    """Run the eval set of `folder` against a test server; keywords are fields of `EvalRun` or of `Hooks`, or max_length."""
    max_length = changes.pop("max_length", 512)
    hooks = Hooks(**{key: changes.pop(key) for key in ("check", "decided", "cache") if key in changes})
    values: dict[str, Any] = {"folder": folder, "task": "zoo", "items": None, "seed": 0, "concurrency": 4}
    endpoint = Endpoint(server.base_url, getattr(server, "served_name", "demo"), tokenizer, max_length)
    return run_quality(EvalRun(**(values | changes)), endpoint, folder.parent / "work", hooks)


def test_a_model_that_knows_the_answers_scores_full_marks(folder: Path, tokenizer_dir: Path) -> None:
    """Against the mock engine: a token is likely where prompt and right choice go on with it."""
    right = [item["prompt"] + item["choices"][item["answer"]] for item in _items()]

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
    for item, sample in zip(_items(), scores.samples, strict=True):
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
        edited = _items()
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
    items = _items()
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
    folder: Path, tokenizer_dir: Path
) -> None:
    """Every connection is cut at once, as when the process is gone; the cause is the server's to tell."""
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
        started = time.monotonic()
        with pytest.raises(EngineFailedError, match=r"out of memory; its log is serve\.log"):
            score(folder, tokenizer_dir, mock, check=check)
        killer.join(10)
    assert time.monotonic() - started < 15


def test_an_engine_that_hangs_is_given_up_on(folder: Path, tokenizer_dir: Path) -> None:
    release = threading.Event()
    with (
        scoring_server(delay=lambda: release.wait(20)) as server,
        pytest.raises(EngineFailedError, match="didn't answer a scoring request in time"),
    ):
        try:
            score(folder, tokenizer_dir, server, request_timeout_s=1)
        finally:
            release.set()


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


# --- stopping early, resuming, and never mixing variants up ---------------------------------------------------


def test_a_sequential_run_stops_at_the_look_that_decides(folder: Path, tokenizer_dir: Path) -> None:
    seen: list[int] = []

    def decided(samples: Any) -> bool:
        seen.append(len(samples))
        return len(samples) >= 20

    with scoring_server() as server:
        early = score(folder, tokenizer_dir, server, looks=(10, 20, 30, 40), decided=decided)
        sent = len(server.requests)
        everything = score(folder, tokenizer_dir, server, looks=(10, 20, 30, 40))
    assert seen == [10, 20] and sent == 80
    assert early.samples == everything.samples[:20] and len(everything.samples) == 40
    assert [sample.id for sample in everything.samples] != [f"page-{index}" for index in range(40)]


def identity(**changes: Any) -> dict[str, Any]:
    return {
        "variant": "awq",
        "checkpoint": "c1",
        "engine_version": "0.32.0",
        "options": ["--dtype", "x"],
    } | changes


def test_a_killed_run_goes_on_where_it_was(folder: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    """The engine fails in the middle; the second run asks only for what was not answered, and says the same."""
    with scoring_server() as server:
        whole = score(folder, tokenizer_dir, server)
    cache = RequestCache(tmp_path / "cache", identity())
    with scoring_server(lambda body: b"", every=100) as server:
        with pytest.raises(EngineFailedError):
            score(folder, tokenizer_dir, server, cache=cache)
        answered = len(server.requests) - 1
    cache.close(finished=False)
    again = RequestCache(tmp_path / "cache", identity())
    with scoring_server() as server:
        resumed = score(folder, tokenizer_dir, server, cache=again)
        assert (
            0 < len(server.requests) <= 160 - answered + 8
        )  # what was in flight at the failure is asked again
    assert resumed.samples == whole.samples
    again.close(finished=True)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        {"variant": "bf16-again"},
        {"checkpoint": "c2"},
        {"engine_version": "0.33.0"},
        {"options": ["--dtype", "y"]},
    ],
)
def test_no_variant_sees_anothers_answers(
    folder: Path, tokenizer_dir: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    """One cache folder, two identities that differ in one thing: the second run asks everything itself."""
    with scoring_server() as server:
        kept = RequestCache(tmp_path / "cache", identity())
        score(folder, tokenizer_dir, server, cache=kept)
        kept.close(finished=False)
        assert len(server.requests) == 160
        cache = RequestCache(tmp_path / "cache", identity(**other))
        score(folder, tokenizer_dir, server, cache=cache)
        assert len(server.requests) == 320 and cache.hits == 0
        cache.close(finished=False)


def test_an_edited_item_isnt_answered_from_the_requests_kept(
    folder: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    cache = RequestCache(tmp_path / "cache", identity())
    with scoring_server() as server:
        score(folder, tokenizer_dir, server, cache=cache)
        edited = _items()
        edited[5]["prompt"] = "Page 5 was torn out. The animal on page 5 is the"
        write_items(folder, edited)
        score(folder, tokenizer_dir, server, cache=cache)
    assert len(server.requests) == 164
    cache.close(finished=True)


# --- other kinds of tasks -------------------------------------------------------------------------------------

GENERATED = """\
task: names
dataset_path: json
dataset_kwargs:
  data_files:
    test: names.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: true
    regexes_to_ignore: ["^\\\\s+", "\\\\s+$"]
"""


def generative(folder: Path, answers: list[str], yaml: str = GENERATED) -> None:
    """A task of short answers beside the first one."""
    items = [
        {"id": f"n{i}", "slice": "names", "cluster": f"n{i}", "prompt": f"Name {i}:", "answer": answer}
        for i, answer in enumerate(answers)
    ]
    (folder / "names.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "names.yaml").write_text(yaml)


def test_short_answers_are_matched_and_empty_and_cut_ones_counted(folder: Path, tokenizer_dir: Path) -> None:
    generative(folder, ["tiger", "camel", "mouse", "whale"])
    everything = {
        "Name 0:": (" Tiger.", "stop"),
        "Name 1:": ("", "stop"),
        "Name 2:": (" mouse mouse", "length"),
    }
    with scoring_server(
        answers=lambda text: everything.get(text, (" whale", "stop")), tokenizer=tokenizer_dir
    ) as server:
        scores = score(folder, tokenizer_dir, server, task="names", metric="exact_match")
    assert [sample.correct for sample in scores.samples] == [True, False, False, True]
    assert [sample.generated for sample in scores.samples] == [" Tiger.", "", " mouse mouse", " whale"]
    assert [sample.expected for sample in scores.samples] == ["tiger", "camel", "mouse", "whale"]
    assert (scores.scores.format.empty_answers, scores.scores.format.cut_answers) == (1, 1)
    assert all(request["stop"] == ["\n"] and request["max_tokens"] == 6 for request in server.requests)
    assert all(request["temperature"] == 0 for request in server.requests)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('  until: ["\\n"]\n', "", "must give until and max_gen_toks"),
        ("  max_gen_toks: 6\n", "", "must give until and max_gen_toks"),
        ('"{{answer}}"', '"x"', "doc_to_target must give the item's own"),
        ("max_gen_toks: 6", "max_gen_toks: 600", r"4 eval items don't fit.*n0, n1"),
    ],
)
def test_a_generative_task_says_where_answers_end(
    folder: Path, tokenizer_dir: Path, old: str, new: str, says: str
) -> None:
    assert old in GENERATED
    generative(folder, ["tiger", "camel", "mouse", "whale"], GENERATED.replace(old, new, 1))
    with (
        scoring_server(answers=lambda text: ("x", "stop"), tokenizer=tokenizer_dir) as server,
        pytest.raises(UserInputError, match=says),
    ):
        score(folder, tokenizer_dir, server, task="names", metric="exact_match")


def test_a_metric_that_isnt_there_is_refused(folder: Path, tokenizer_dir: Path) -> None:
    generative(folder, ["tiger", "camel"])
    with scoring_server(answers=lambda text: ("x", "stop"), tokenizer=tokenizer_dir) as server:
        with pytest.raises(UserInputError, match="metric is 'bleu'; the task has exact_match"):
            score(folder, tokenizer_dir, server, task="names", metric="bleu")
        with pytest.raises(UserInputError, match="metric is None"):
            score(folder, tokenizer_dir, server, task="names")


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"index": 0, "text": None, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "text": "x", "finish_reason": "abort"}]},
        {"choices": []},
        {"error": "no"},
    ],
)
def test_a_generated_answer_that_is_none_fails_the_run(
    folder: Path, tokenizer_dir: Path, body: dict[str, Any]
) -> None:
    generative(folder, ["tiger", "camel"])
    with (
        scoring_server(lambda _: body) as server,
        pytest.raises(EngineFailedError, match="the engine's answer"),
    ):
        score(folder, tokenizer_dir, server, task="names", metric="exact_match")


def test_whole_texts_are_measured(folder: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    """A rolling task: the likelihood of each text, the longer one in several windows."""
    texts = ["The zoo is open.", "The tiger sleeps. " * 30]
    items = [
        {"id": f"t{i}", "slice": "texts", "cluster": f"t{i}", "text": text} for i, text in enumerate(texts)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    yaml = YAML.replace("task: zoo", "task: texts").replace("items.jsonl", "texts.jsonl")
    yaml = yaml[: yaml.index("output_type")] + (
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: byte_perplexity\n"
    )
    (folder / "texts.yaml").write_text(yaml)
    with scoring_server() as server:
        with pytest.raises(UserInputError, match="neither BOS nor EOS"):
            score(folder, tokenizer_dir, server, task="texts", max_length=64)
        own = with_bos(tokenizer_dir, tmp_path / "bos", CHAT)
        scores = score(folder, own, server, task="texts", max_length=64).scores
    assert (scores.kind, scores.n, scores.accuracy, scores.samples) == ("loglikelihood_rolling", 2, None, [])
    assert [text.utf8_bytes for text in scores.texts] == [len(text.encode()) for text in texts]
    assert scores.texts[1].loglikelihood < scores.texts[0].loglikelihood < 0
    assert len(server.requests) > 2


@pytest.fixture
def benchmarks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """lm-eval's own tasks as far as this machine reaches: those of the folder, under names that need no folder."""
    import lm_eval.tasks

    yaml = YAML.replace("items.jsonl", str(folder / "items.jsonl"))
    (folder / "zoo.yaml").write_text(yaml)
    generative(folder, ["tiger", "camel", "mouse"])
    names = (folder / "names.yaml").read_text().replace("names.jsonl", str(folder / "names.jsonl"))
    filters = "filter_list:\n  - {name: a, filter: [{function: take_first}]}\n  - {name: b, filter: [{function: take_first}]}\n"
    (folder / "names.yaml").write_text(names + filters)
    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda **_: manager(include_path=str(folder), include_defaults=False)
    )
    return folder


def test_a_benchmark_is_paired_by_its_items_places(benchmarks: Path, tokenizer_dir: Path) -> None:
    """One of lm-eval's own tasks: its metric says right or wrong, the sample is the first items, ids are places."""
    endpoint = EvalRun(folder=None, task="zoo", items=12, seed=0, concurrency=4, metric="acc")
    with scoring_server() as server:
        own = score(benchmarks, tokenizer_dir, server)
        found = run_quality(
            endpoint, Endpoint(server.base_url, "demo", tokenizer_dir, 512), benchmarks.parent / "b"
        )
        again = run_quality(
            endpoint, Endpoint(server.base_url, "demo", tokenizer_dir, 512), benchmarks.parent / "b"
        )
    assert [sample.id for sample in found.samples] == [f"zoo-{index:05}" for index in range(12)]
    for sample, same in zip(found.samples, own.samples, strict=False):
        assert (sample.correct, sample.chosen, sample.loglikelihoods) == (
            same.correct,
            same.chosen,
            same.loglikelihoods,
        )
        assert (sample.expected, sample.prompt, sample.slice) == (same.expected, same.prompt, "zoo")
    assert again.evalset_sha256 == found.evalset_sha256 and again.samples == found.samples


def test_a_benchmark_with_several_filters_is_read_through_the_one_that_is_named(
    benchmarks: Path, tokenizer_dir: Path
) -> None:
    run = EvalRun(None, "names", None, 0, 4, metric="exact_match", filter="b")
    with scoring_server(answers=lambda text: (" tiger", "stop"), tokenizer=tokenizer_dir) as server:
        endpoint = Endpoint(server.base_url, "demo", tokenizer_dir, 512)
        found = run_quality(run, endpoint, benchmarks.parent / "b")
        assert [sample.correct for sample in found.samples] == [True, False, False]
        assert [sample.expected for sample in found.samples] == ["tiger", "camel", "mouse"]
        with pytest.raises(UserInputError, match="has no filter 'strict'; allowed: a, b"):
            run_quality(replace(run, filter="strict"), endpoint, benchmarks.parent / "b")


# --- BOS and chat template ------------------------------------------------------------------------------------


def with_bos(tokenizer_dir: Path, target: Path, template: str) -> Path:
    """The tokenizer, with a BOS token that it puts before every text, and a chat template."""
    from tokenizers import Tokenizer, processors

    target.mkdir()
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "config.json").write_text('{"model_type": "llama"}')
    return target


CHAT = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"


def test_a_model_that_wants_a_bos_gets_one(folder: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    own = with_bos(tokenizer_dir, tmp_path / "bos", CHAT)
    with scoring_server() as server:
        plain = score(folder, own, server)
    assert plain.scores.format.bos_tokens == 1
    assert all(request["prompt"][0].count(request["prompt"][0][0]) == 1 for request in server.requests)


def test_the_chat_template_is_applied_as_the_task_says_and_recorded(
    folder: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    own = with_bos(tokenizer_dir, tmp_path / "bos", "<s>" + CHAT)
    with scoring_server() as server:
        chat = score(folder, own, server, chat_template=True)
    assert chat.scores.format.chat_template and chat.scores.format.bos_tokens == 1
    assert chat.samples[0].prompt.startswith("<s>User: ")
    with scoring_server() as server:
        assert score(folder, tokenizer_dir, server).scores.format.bos_tokens == 0


def test_a_bos_twice_or_missing_is_refused(folder: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    twice = with_bos(tokenizer_dir, tmp_path / "twice", "<s><s>" + CHAT)
    without = with_bos(tokenizer_dir, tmp_path / "without", CHAT)
    with scoring_server() as server:
        with pytest.raises(UserInputError, match="begin with 2 BOS tokens"):
            score(folder, twice, server, chat_template=True)
        with pytest.raises(
            UserInputError, match="begin with 0 BOS tokens where the model's tokenizer puts one"
        ):
            score(folder, without, server, chat_template=True)
        assert server.requests == []


def test_an_engine_that_scores_everything_alike_is_refused(folder: Path, tokenizer_dir: Path) -> None:
    def flat(body: dict[str, Any]) -> dict[str, Any]:
        values = body["choices"][0]["logprobs"]["token_logprobs"]
        body["choices"][0]["logprobs"]["token_logprobs"] = [None] + [0.0] * (len(values) - 1)
        return body

    with (
        scoring_server(flat) as server,
        pytest.raises(EngineFailedError, match="same score: it isn't scoring"),
    ):
        score(folder, tokenizer_dir, server)
