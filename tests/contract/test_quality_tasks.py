"""lm-eval runs beyond a set of choices: stopped early, resumed, generated, measured, and put with BOS and chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.cache import RequestCache
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, run_quality
from tests.support.scoring_server import scoring_server
from tests.support.zoo_set import YAML, score, write_items, zoo_items

# --- stopping early, resuming, and never mixing variants up ---------------------------------------------------


def test_a_sequential_run_stops_at_the_look_that_decides(folder: Path, tokenizer_dir: Path) -> None:
    seen: list[int] = []

    def decided(samples: Any) -> bool:
        seen.append(len(samples))
        return len(samples) >= 20

    with scoring_server() as server:
        early = score(folder, tokenizer_dir, server, looks=4, decided=decided)
        sent = len(server.requests)
        everything = score(folder, tokenizer_dir, server, looks=4)
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
        edited = zoo_items()
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


def test_a_groups_tasks_are_its_slices(benchmarks: Path, tokenizer_dir: Path) -> None:
    (benchmarks / "other.yaml").write_text(
        (benchmarks / "zoo.yaml").read_text().replace("task: zoo", "task: other")
    )
    (benchmarks / "group.yaml").write_text("group: both\ntask: [zoo, other]\n")
    run = EvalRun(folder=None, task="both", items=5, seed=0, concurrency=4, metric="acc")
    with scoring_server() as server:
        endpoint = Endpoint(server.base_url, "demo", tokenizer_dir, 512)
        found = run_quality(run, endpoint, benchmarks.parent / "b")
        assert {name: one.n for name, one in found.scores.slices.items()} == {"other": 5, "zoo": 5}
        leak = replace(run, calibration={"diary": zoo_items()[2]["prompt"]})
        with pytest.raises(UserInputError, match=r"eval item 'zoo-00002' .*; 1 more items leak too"):
            run_quality(leak, endpoint, benchmarks.parent / "b")


def test_a_benchmark_too_stops_at_the_look_that_decides(benchmarks: Path, tokenizer_dir: Path) -> None:
    """Over a group's tasks in an order of its own: a part of the reference's run, item by item, prompt by prompt."""
    (benchmarks / "other.yaml").write_text(
        (benchmarks / "zoo.yaml").read_text().replace("task: zoo", "task: other")
    )
    (benchmarks / "group.yaml").write_text("group: both\ntask: [zoo, other]\n")
    run = EvalRun(folder=None, task="both", items=20, seed=0, concurrency=4, metric="acc", looks=4)
    with scoring_server() as server:
        endpoint = Endpoint(server.base_url, "demo", tokenizer_dir, 512)
        whole = run_quality(run, endpoint, benchmarks.parent / "b")
        asked = len(server.requests)
        early = run_quality(
            run, endpoint, benchmarks.parent / "b", Hooks(decided=lambda samples: len(samples) >= 20)
        )
    assert asked == 160 and len(server.requests) - asked == 80
    assert early.samples == whole.samples[:20] and len(whole.samples) == 40
    assert sorted(s.id for s in whole.samples) == sorted(
        f"{task}-{place:05}" for task in ("other", "zoo") for place in range(20)
    )
    by_place = {item["prompt"]: place for place, item in enumerate(zoo_items())}
    assert all(s.id == f"{s.slice}-{by_place[s.prompt]:05}" for s in whole.samples)
    assert {s.slice for s in early.samples} == {"other", "zoo"}


ASKED = "A keeper forgot his bucket beside the pond, and the first to find it was the"
NOT_ASKED = "Before the gates open somebody has to wake the old and sleepy"
NOTE = "In the visitors' book of that spring a child from the village draws a whole pride of lions and writes a name under each."


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"We read: {ASKED} zebra.", r"'zoo-00003' is also in the text 'diary' \(word for word\)"),
        (f"Today {NOTE[3:110]}!", r"'zoo-00005' is also in the text 'diary' \(\d+% of"),
        ("A keeper forgot his bucket beside the sea.", None),
        (NOT_ASKED, None),
    ],
)
def test_a_benchmark_s_items_may_not_be_calibration_text(
    benchmarks: Path, tokenizer_dir: Path, text: str, says: str | None
) -> None:
    """Found before the first request: a prompt, or what is most of an item; but not one that isn't asked."""
    items = zoo_items()
    items[3]["prompt"], items[5]["note"], items[12]["prompt"] = ASKED, NOTE, NOT_ASKED
    write_items(benchmarks, items)
    run = EvalRun(folder=None, task="zoo", items=12, seed=0, concurrency=4, metric="acc")
    run = replace(run, calibration={"other": "Nothing of the kind.", "diary": text})
    with scoring_server() as server:
        endpoint = Endpoint(server.base_url, "demo", tokenizer_dir, 512)
        if says is None:
            assert len(run_quality(run, endpoint, benchmarks.parent / "b").samples) == 12
            return
        with pytest.raises(
            UserInputError, match=f"eval item {says}.*measured on what the model was tuned on$"
        ):
            run_quality(run, endpoint, benchmarks.parent / "b")
        assert server.requests == []


def test_a_benchmark_s_generated_answer_may_not_be_calibration_text(
    benchmarks: Path, tokenizer_dir: Path
) -> None:
    solution = "first four tigers, then three of them leave"
    generative(benchmarks, ["tiger", solution, "mouse"])
    yaml = (benchmarks / "names.yaml").read_text().replace("names.jsonl", str(benchmarks / "names.jsonl"))
    (benchmarks / "names.yaml").write_text(yaml.replace("{{answer}}", "{{answer | replace('four', 'five')}}"))
    run = EvalRun(None, "names", None, 0, 4, metric="exact_match")
    told = f"It was so: {solution.replace('four', 'five')}."
    run = replace(run, calibration={"diary": told})
    with scoring_server(answers=lambda text: (" tiger", "stop"), tokenizer=tokenizer_dir) as server:
        endpoint = Endpoint(server.base_url, "demo", tokenizer_dir, 512)
        with pytest.raises(UserInputError, match="eval item 'names-00001' is also in the text 'diary'"):
            run_quality(run, endpoint, benchmarks.parent / "b")
        assert server.requests == []


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


def chat_tokenizer(target: Path) -> Path:
    """A tokenizer with markers of turns that are one token each, a BOS before every text, and a template that has both."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors

    target.mkdir()
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["user assistant Name 0: tiger camel"] * 4, vocab_size=300)
    trained.save(str(target / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "<|turn|>", "<|end|>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(target / "tokenizer.json"))
    template = (
        "<s>{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
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


def test_a_chats_tokens_are_exactly_those_of_the_models_own_template(folder: Path, tmp_path: Path) -> None:
    """As a server of chat completions would put them: one turn of the user's, the answer's beginning, one BOS, markers whole."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "chat"))
    generative(folder, ["tiger", "camel"])
    with scoring_server(answers=lambda text: (" tiger", "stop"), tokenizer=tmp_path / "chat") as server:
        scores = score(
            folder, tmp_path / "chat", server, task="names", metric="exact_match", chat_template=True
        )
    turns = [[{"role": "user", "content": f"Name {i}:"}] for i in range(2)]
    assert_sent(server.requests, tokenizer, turns)
    assert scores.scores.format.chat_template and scores.scores.format.bos_tokens == 1


def assert_sent(requests: list[dict[str, Any]], tokenizer: Any, turns: list[list[dict[str, str]]]) -> None:
    wanted = [
        tokenizer.apply_chat_template(turn, tokenize=True, add_generation_prompt=True, return_dict=False)
        for turn in turns
    ]
    assert sorted(request["prompt"][0] for request in requests) == sorted(wanted)
    assert wanted[0][0] == tokenizer.bos_token_id and wanted[0].count(tokenizer.bos_token_id) == 1
    assert tokenizer.convert_tokens_to_ids("<|turn|>") in wanted[0]


def test_an_item_that_is_a_chat_keeps_its_turns(folder: Path, tmp_path: Path) -> None:
    """Turn by turn as in a conversation, quotes and markup untouched; without a template it is refused, not scored as JSON."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "chat"))
    chats = [
        [
            {"role": "system", "content": 'Be <b>brief</b> & "exact".'},
            {"role": "user", "content": "Name 0:"},
            {"role": "assistant", "content": "tiger"},
            {"role": "user", "content": f"It's name {i}:"},
        ]
        for i in range(1, 3)
    ]
    items = [
        {"id": f"n{i}", "slice": "names", "cluster": f"n{i}", "messages": chat, "answer": "camel"}
        for i, chat in enumerate(chats)
    ]
    (folder / "names.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "names.yaml").write_text(GENERATED.replace("{{prompt}}", "{{messages | tojson}}"))
    with scoring_server(answers=lambda text: ("camel", "stop"), tokenizer=tmp_path / "chat") as server:
        with pytest.raises(UserInputError, match=r"eval item n0 is a chat .* set chat_template: true"):
            score(folder, tmp_path / "chat", server, task="names", metric="exact_match")
        assert server.requests == []
        scores = score(
            folder, tmp_path / "chat", server, task="names", metric="exact_match", chat_template=True
        )
    assert_sent(server.requests, tokenizer, chats)
    assert all(sample.correct for sample in scores.samples)


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
