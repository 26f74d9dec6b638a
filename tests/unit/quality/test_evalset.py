"""Eval items and texts: what is refused and how it is said, the sample, the leaks, and the set that ships."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.quality.evalset import (
    Item,
    check_no_leak,
    describe,
    find_leaks,
    load_items,
    sample_items,
    scoring_order,
)
from pipeline.quality.intervals import paired_interval
from pipeline.settings import load_settings
from pipeline.texts import Match, load_texts

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "id": "a",
    "slice": "animals",
    "cluster": "c1",
    "prompt": "A young dog is called a",
    "choices": [" puppy", " kitten"],
    "answer": 0,
}


def write(path: Path, *lines: Any) -> Path:
    """Lines as given where they are text, else as JSON."""
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def item(identity: str, slice_name: str = "s", prompt: str = "p", answer: str = " yes") -> Item:
    return Item(identity, slice_name, identity, prompt, (answer, " no"), 0)


# --- reading ---------------------------------------------------------------------------------------------------


def test_items_are_read_in_file_order_with_foreign_keys_and_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "items.jsonl", GOOD, "", GOOD | {"id": "b", "note": "ours", "answer": 1})
    assert load_items(path) == [
        Item("a", "animals", "c1", "A young dog is called a", (" puppy", " kitten"), 0),
        Item("b", "animals", "c1", "A young dog is called a", (" puppy", " kitten"), 1),
    ]


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """U+2028 inside a JSON string is text; str.splitlines would cut the object there."""
    path = write(tmp_path / "items.jsonl", GOOD | {"prompt": "one\u2028two"}, GOOD | {"id": "b"})
    assert load_items(path)[0].prompt == "one\u2028two"


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "b",', r"line 2, column 12: not valid JSON"),
        ("[1, 2]", r"line 2: \[1, 2\]; allowed is one JSON object per line"),
        ('{"id": "b", "id": "c"}', r"line 2: id: given twice in one object"),
        *[(without(key), rf"line 2: key '{key}' is missing; keys there: ") for key in GOOD],
        (GOOD | {"id": 7}, r"line 2: id: 7; allowed is a text that isn't empty"),
        (GOOD | {"slice": ""}, r'line 2: slice: ""; allowed is a text'),
        (GOOD | {"cluster": None}, r"line 2: cluster: null; allowed is a text"),
        (GOOD | {"id": "b", "prompt": " \n"}, r'line 2: prompt: " \\n"; allowed is a text'),
        (
            GOOD | {"id": "b", "choices": " puppy"},
            r"line 2, item 'b': choices: \" puppy\"; allowed is a list of texts",
        ),
        (
            GOOD | {"id": "b", "choices": [" x", 3]},
            r"item 'b': choices: \[\" x\", 3\]; allowed is a list of texts",
        ),
        (GOOD | {"id": "b", "choices": [" x", ""]}, r"item 'b': choices: .* texts that aren't empty"),
        (GOOD | {"id": "b", "choices": [" x"]}, r"item 'b': choices: \[\" x\"\]; allowed are 2 or more"),
        (
            GOOD | {"id": "b", "choices": [" x", " y", " x"]},
            r"choices: ' x' is choice 0 and choice 2; allowed is once",
        ),
        (
            GOOD | {"id": "b", "answer": 2},
            r"item 'b': answer: 2; allowed is the index of the right choice, 0 to 1",
        ),
        (GOOD | {"id": "b", "answer": -1}, r"answer: -1; allowed is the index"),
        (GOOD | {"id": "b", "answer": True}, r"answer: true; allowed is the index"),
        (GOOD | {"id": "b", "answer": "0"}, r'answer: "0"; allowed is the index'),
        (GOOD | {"prompt": "another"}, r"line 2: id: 'a' is already in line 1"),
    ],
)
def test_a_faulty_item_is_refused_with_its_line_key_and_value(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path / "items.jsonl", GOOD, line)
    with pytest.raises(UserInputError, match=said) as caught:
        load_items(path)
    assert str(caught.value).startswith(f"{path}, line 2")


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no such file"):
        load_items(tmp_path / "items.jsonl")
    with pytest.raises(UserInputError, match="no such file"):
        load_items(tmp_path)  # a folder
    with pytest.raises(UserInputError, match="empty"):
        load_items(write(tmp_path / "items.jsonl", "", "  "))
    with pytest.raises(UserInputError, match="only one item"):
        load_items(write(tmp_path / "items.jsonl", GOOD))


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "\xe9"}\n')
    with pytest.raises(UserInputError, match=r"line 2: not UTF-8 \(byte 9\)"):
        load_items(path)


def test_texts_are_read_with_the_same_errors(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    assert load_texts(write(path, {"id": "t", "text": "Hello."})) == {"t": "Hello."}
    for line, said in (
        ({"id": "u"}, "line 2: key 'text' is missing; keys there: id"),
        ({"id": "u", "text": ["x"]}, r'line 2: text: \["x"\]; allowed is a text'),
        ({"id": "t", "text": "x"}, "line 2: id: 't' is already in line 1"),
        ("nonsense", "line 2, column 1: not valid JSON"),
    ):
        with pytest.raises(UserInputError, match=said):
            load_texts(write(path, {"id": "t", "text": "Hello."}, line))
    with pytest.raises(UserInputError, match="empty"):
        load_texts(write(path))


# --- sampling --------------------------------------------------------------------------------------------------


def items_of(**sizes: int) -> list[Item]:
    """Items of several slices, mixed in the file."""
    every = [item(f"{name}-{index}", name) for name, size in sizes.items() for index in range(size)]
    return sorted(every, key=lambda entry: (int(entry.id.split("-")[1]), entry.slice))


def test_the_sample_is_the_same_everywhere() -> None:
    """Pinned: two variants that are scored on different machines must get the same items."""
    chosen = [entry.id for entry in sample_items(items_of(a=6, b=3), 4, seed=7)]
    assert chosen == ["a-0", "a-2", "b-2", "a-3"]


def test_the_sample_keeps_the_file_order_and_depends_on_the_seed() -> None:
    items = items_of(a=60, b=30)
    first, second = sample_items(items, 30, seed=1), sample_items(items, 30, seed=2)
    assert first != second and first == sample_items(items, 30, seed=1)
    assert first == [entry for entry in items if entry in first]


def test_the_sample_does_not_depend_on_the_file_order() -> None:
    items = items_of(a=60, b=30)
    assert set(sample_items(items, 30, seed=1)) == set(sample_items(items[::-1], 30, seed=1))


@pytest.mark.parametrize(
    ("sizes", "n", "expected"),
    [
        ({"a": 60, "b": 30, "c": 10}, 10, {"a": 6, "b": 3, "c": 1}),
        ({"a": 97, "b": 2, "c": 1}, 10, {"a": 8, "b": 1, "c": 1}),  # one of each, though their share is less
        ({"a": 5, "b": 5, "c": 5}, 4, {"a": 2, "b": 1, "c": 1}),  # an even tie goes by name
        ({"a": 3, "b": 3}, 6, {"a": 3, "b": 3}),
        ({"a": 7, "b": 1, "c": 1}, 3, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_slices_are_sampled_in_proportion(sizes: dict[str, int], n: int, expected: dict[str, int]) -> None:
    assert Counter(entry.slice for entry in sample_items(items_of(**sizes), n, seed=3)) == expected


def test_no_number_takes_all_and_an_impossible_one_is_refused() -> None:
    items = items_of(a=5, b=5)
    assert sample_items(items, None, seed=0) == items
    for n in (0, 1, 11, -3):
        with pytest.raises(UserInputError, match=rf"evalset.items: {n}; allowed is 2 .* to 10"):
            sample_items(items, n, seed=0)


# --- leaks -----------------------------------------------------------------------------------------------------

LONG = "On the third day of the fair the baker sold forty loaves before noon and the miller sold none. He was"


def test_a_prompt_in_a_text_is_a_leak_whatever_its_case_spacing_and_punctuation() -> None:
    text = "Well: on the THIRD day of the fair, the baker sold forty\nloaves before noon, and the miller sold none; he was!"
    (leak,) = find_leaks([item("x", prompt=LONG)], {"other": "Nothing here.", "t": text})
    assert (leak.item_id, leak.match) == ("x", Match("t", "exact", 1.0))


def test_a_short_prompt_counts_together_with_its_right_answer() -> None:
    """Five words are shared by chance; five words and the answer are the fact itself."""
    france = item("x", prompt="The capital of France is", answer=" Paris")
    assert find_leaks([france], {"t": "They knew that the capital of France is Paris."})
    assert not find_leaks([france], {"t": "They knew that the capital of France is large."})
    assert not find_leaks([item("x", prompt="The sky", answer=" is")], {"t": "The sky is blue."})


def test_words_match_whole() -> None:
    assert not find_leaks(
        [item("x", prompt="he sees the old red barn door")], {"t": "She sees the old red barn doors."}
    )


def test_operators_are_part_of_an_item() -> None:
    code = item("x", prompt="def f ( a , b ) : return a + b then stop", answer=" now")
    assert find_leaks([code], {"t": "def f(a, b): return a + b then stop now"})
    assert not find_leaks([code], {"t": "def f(a, b): return a - b then stop now"})


def test_half_of_the_word_sequences_make_a_near_duplicate() -> None:
    """19 words and the pronoun: 13 sequences of 8. A change in the last third leaves most of them."""
    late = LONG.replace("the miller", "the old miller")
    (leak,) = find_leaks([item("x", prompt=LONG)], {"t": late})
    assert leak.match.kind == "near" and 0.5 <= leak.match.overlap < 1.0
    middle = LONG.replace("baker sold", "baker gave").replace("noon and", "noon while")
    assert not find_leaks([item("x", prompt=LONG)], {"t": middle})


def test_chinese_is_compared_by_characters() -> None:
    prompt = "从前有一个农民，他在田里种了很多西瓜，可是每天晚上都有人来偷，最后他想了一个"
    chinese = item("x", prompt=prompt, answer="办法")
    assert find_leaks([chinese], {"t": f"故事：{prompt}"})[0].match.kind == "exact"
    near = prompt.replace("最后他想了一个", "于是大家都很生气")
    assert find_leaks([chinese], {"t": near})[0].match.kind == "near"
    assert not find_leaks([chinese], {"t": "从前有一个渔夫，他在海边住了很多年，每天早上都出去打鱼。"})
    assert not find_leaks(
        [item("y", prompt="法国的首都是", answer="巴黎")], {"t": "法国的首都是巴黎。"}
    )  # too short


def test_a_leak_is_refused_with_both_names_and_the_number_of_others() -> None:
    items = [
        item("clean", prompt="Nothing of this is anywhere else to be found"),
        *(item(name, prompt=LONG) for name in "xy"),
    ]
    with pytest.raises(
        UserInputError, match=r"'x' is also in the text 't' \(word for word\).*; 1 more items leak too"
    ):
        check_no_leak(items, {"t": LONG})
    with pytest.raises(UserInputError, match=r"\(\d+% of its sequences of 8 words or 12 CJK characters\)"):
        check_no_leak(items[:2], {"t": LONG.replace("the miller", "the old miller")})
    check_no_leak(items, {"t": "Another text."})


def test_a_description_counts_and_its_hash_follows_the_content() -> None:
    items = items_of(a=3, b=1)
    found = describe(items)
    assert found["items"] == 4 and found["slices"] == {"a": 3, "b": 1}
    assert found["clusters"] == 4 and found["answers"] == {0: 4}
    assert found["sha256"] != describe(items[:3])["sha256"]


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        ("generate_until", {"answer": 0}, "answer: 0; allowed is a text"),
        ("generate_until", {"answer": " "}, 'answer: " "; allowed is a text'),
        ("loglikelihood_rolling", {}, "key 'text' is missing"),
    ],
)
def test_each_kind_of_task_needs_its_own_keys(
    tmp_path: Path, kind: Any, line: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "items.jsonl", GOOD | line)
    with pytest.raises(UserInputError, match=said):
        load_items(path, kind)


def test_answers_and_texts_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "items.jsonl", *(GOOD | {"id": i, "answer": "puppy", "text": "Long."} for i in "ab")
    )
    first = load_items(path, "generate_until")[0]
    assert (first.choices, first.right, first.prompt) == ((), "puppy", GOOD["prompt"])
    assert load_items(path, "loglikelihood_rolling")[0].prompt == "Long."


def test_a_sample_takes_an_item_of_every_cluster_before_a_second_of_any() -> None:
    """20 clusters of three: any sample of up to 20 holds no two of one, and one of 30 at most two."""
    items = [Item(f"i{n}", "s", f"c{n // 3}", "p", (" a", " b"), 0) for n in range(60)]
    for count, most in ((10, 1), (20, 1), (30, 2), (60, 3)):
        assert max(Counter(entry.cluster for entry in sample_items(items, count, 3)).values()) == most


def test_some_slices_can_have_a_number_of_their_own() -> None:
    items = items_of(a=50, b=100, c=50)
    found = Counter(entry.slice for entry in sample_items(items, 64, 3, {"a": 4}))
    assert found == {"a": 4, "b": 40, "c": 20}
    assert Counter(e.slice for e in sample_items(items, 9, 3, {"a": 4, "b": 3, "c": 2})) == {
        "a": 4,
        "b": 3,
        "c": 2,
    }
    for n, fixed, said in (
        (5, {"a": 4}, r"items: 5; allowed is 6 \(one per slice\) to 154"),
        (155, {"a": 4}, r"items: 155; allowed is 6"),
        (64, {"d": 4}, r"slice_items\.d: 4; allowed are slices of the set \(a, b, c\)"),
        (64, {"a": 51}, r"slice_items\.a: 51"),
    ):
        with pytest.raises(UserInputError, match=said):
            sample_items(items, n, 3, fixed)


def test_the_scoring_order_is_a_shuffle_that_only_seed_and_ids_decide() -> None:
    items = {entry.id: entry for entry in items_of(a=40, b=40)}
    order = scoring_order(items, 3)
    assert order == scoring_order(list(reversed(items)), 3) != scoring_order(items, 4)
    assert sorted(order) == sorted(items)
    assert 10 <= sum(items[one].slice == "a" for one in order[:40]) <= 30


# --- what ships ------------------------------------------------------------------------------------------------

TEAM_DEMO = ROOT / "evalsets/team-demo"
CALIBRATION = ROOT / "evalsets/calibration"
SLICES = ("knowledge", "language", "arithmetic", "code", "chinese", "long_context")


@pytest.fixture(scope="module")
def shipped() -> list[Item]:
    return load_items(TEAM_DEMO / "items.jsonl")


def test_the_shipped_set_has_enough_of_everything(shipped: list[Item]) -> None:
    found = describe(shipped)
    assert found["items"] >= 800 and set(found["slices"]) == set(SLICES)
    assert min(found["slices"].values()) >= 100
    assert all(len(entry.choices) == 4 for entry in shipped)


def test_the_right_answers_are_spread_evenly_in_every_slice(shipped: list[Item]) -> None:
    for name in SLICES:
        counts = Counter(entry.answer for entry in shipped if entry.slice == name)
        assert len(counts) == 4 and max(counts.values()) - min(counts.values()) <= 1, name


def test_a_choice_follows_its_prompt_with_exactly_one_space_or_in_chinese_none(shipped: list[Item]) -> None:
    """The task's delimiter is empty; two spaces, or one before a Chinese character, would be scored silently."""
    for entry in shipped:
        assert entry.prompt == entry.prompt.strip(), entry.id
        for choice in entry.choices:
            lead = len(choice) - len(choice.lstrip())
            assert lead == (0 if entry.slice == "chinese" else 1), (entry.id, choice)
            assert choice == choice.rstrip(), (entry.id, choice)


def test_no_choice_begins_another(shipped: list[Item]) -> None:
    """Where " 1" and " 16" share their tokens, " 16" can't be likelier than its own beginning: no model could be right."""
    for entry in shipped:
        for choice in entry.choices:
            others = [other for other in entry.choices if other != choice and other.startswith(choice)]
            assert not others, (entry.id, choice, others)


def test_no_two_items_ask_the_same(shipped: list[Item]) -> None:
    assert len({entry.prompt for entry in shipped}) == len(shipped)
    assert len({entry.id for entry in shipped}) == len(shipped)
    # Passages of different clusters share filler, but never half of their text.
    passages = {entry.cluster: entry for entry in shipped if entry.slice == "long_context"}
    for cluster, entry in passages.items():
        others = {name: other.prompt for name, other in passages.items() if name != cluster}
        assert not find_leaks([entry], others), cluster


def test_a_cluster_stays_in_its_slice(shipped: list[Item]) -> None:
    slices: dict[str, set[str]] = {}
    for entry in shipped:
        slices.setdefault(entry.cluster, set()).add(entry.slice)
    assert not [cluster for cluster, names in slices.items() if len(names) > 1]
    assert len(slices) < len(shipped)  # some facts and every passage are asked more than once


def test_long_prompts_are_long_and_fit(shipped: list[Item]) -> None:
    """At 2,000 characters the longest has 433 tokens of SmolLM2-135M's tokenizer (measured); the demo's window is 480."""
    lengths = [
        len(entry.prompt) + max(map(len, entry.choices)) for entry in shipped if entry.slice == "long_context"
    ]
    assert max(lengths) <= 2000 and sum(length > 1250 for length in lengths) >= 100
    assert max(len(entry.prompt) for entry in shipped if entry.slice != "long_context") < 300


@pytest.mark.parametrize("name", ["calibration", "heldout"])
def test_no_shipped_item_is_in_the_texts(shipped: list[Item], name: str) -> None:
    check_no_leak(shipped, load_texts(CALIBRATION / f"{name}.jsonl"))


def test_the_short_answers_are_short_unique_and_not_given_away() -> None:
    short = load_items(TEAM_DEMO / "short.jsonl", "generate_until")
    assert len(short) >= 100 and {entry.slice for entry in short} >= {"knowledge", "language", "chinese"}
    assert len({entry.prompt for entry in short}) == len(short)
    for entry in short:
        assert entry.expected == entry.expected.strip() and len(entry.expected) <= 20
        *told, question = entry.prompt.splitlines()  # what is said in the chat, a line each
        assert len(told) == 6 and entry.expected not in question, entry.id
        assert entry.slice == "arithmetic" or entry.expected not in told[1::2], entry.id
    for name in ("calibration", "heldout"):
        check_no_leak(short, load_texts(CALIBRATION / f"{name}.jsonl"))


CHAT = [
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": "This."},
    {"role": "user", "content": "And now?"},
]


def test_an_item_may_be_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    lines = [
        {"id": str(n), "slice": "s", "cluster": "c", "messages": CHAT, "answer": "That."} for n in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.prompt for item in load_items(path, "generate_until")] == ["Which?\nThis.\nAnd now?"] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"messages": CHAT[:2]},
            r"line 1: messages: the last turn is the assistant's; allowed is the user's",
        ),
        ({"messages": []}, "line 1: messages: "),
        ({"messages": [{"role": "bot", "content": "x"}]}, "line 1: .*bot"),
        ({"prompt": "Which?"}, "line 1: has prompt and messages; allowed is one of the two"),
    ],
)
def test_a_chat_that_cant_be_asked_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "items.jsonl"
    good = {"id": "a", "slice": "s", "cluster": "c", "messages": CHAT, "answer": "That."}
    path.write_text(json.dumps(good | changes) + "\n" + json.dumps(good | {"id": "b"}) + "\n")
    with pytest.raises(UserInputError, match=said):
        load_items(path, "generate_until")


@pytest.mark.parametrize("profile", ["demo", "rtx4090"])
def test_the_samples_of_the_profiles_can_decide_where_nothing_is_lost(profile: str) -> None:
    """An A/A control without a flip must be a GO at each task's margin, clusters and all."""
    settings = load_settings([f"profile={profile}"], ROOT)
    for task, name, kind in (
        (settings.evalset, "items", "multiple_choice"),
        (settings.evalset.further[0], "short", "generate_until"),
    ):
        items = load_items(TEAM_DEMO / f"{name}.jsonl", kind)
        sample = sample_items(items, task.items, settings.evalset.seed, task.slice_items)
        margin = settings.policy.task_margins.get(task.task, settings.policy.quality_margin)
        low, _ = paired_interval(
            [0] * len(sample), [entry.cluster for entry in sample], settings.policy.confidence
        )
        assert low > -margin, (task.task, low)


def test_calibration_and_held_out_text_are_apart() -> None:
    calibration, heldout = (load_texts(CALIBRATION / f"{name}.jsonl") for name in ("calibration", "heldout"))
    assert len(calibration) >= 128
    # Every paragraph of the held-out text as if it were an item.
    pieces = [Item(name, "s", name, text, (" a", " b"), 0) for name, text in heldout.items()]
    assert not find_leaks(pieces, calibration)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (TEAM_DEMO / "build.py", ["items.jsonl", "short.jsonl"]),
        (
            CALIBRATION / "build.py",
            ["calibration.jsonl", "heldout.jsonl", "chats.jsonl", "heldout-chats.jsonl"],
        ),
    ],
    ids=["team-demo", "calibration"],
)
def test_building_again_gives_the_same_bytes(tmp_path: Path, script: Path, names: list[str]) -> None:
    subprocess.run(
        [sys.executable, str(script), str(tmp_path)], check=True, cwd=tmp_path, capture_output=True
    )
    for name in names:
        assert (tmp_path / name).read_bytes() == (script.parent / name).read_bytes()
    assert not list(script.parent.rglob("__pycache__"))
