"""What goes into calibration is exactly what was asked for, and is counted; what can't be calibrated on is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.files import sha256_file
from pipeline.quality.tasks import refuse_leaks
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.calibration import (
    calibration_pieces,
    coverage_pieces,
    encode,
    kv_pieces,
    pack_tokens,
    refuse_overlap,
)
from pipeline.settings import load_settings
from pipeline.settings.schema import QuantizeRecipe
from pipeline.texts import Text, read_texts

ROOT = Path(__file__).parents[3]
CHAT = {
    "id": "c",
    "messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}],
}
LONG = "On the third day of the fair the baker sold forty loaves before noon and the miller sold none. He was"


class Tokenizer:
    """One token per character, and a template that shows where it was applied."""

    eos_token_id = 0
    chat_template: str | None = "a template"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if messages[0]["content"] == "raise":
            raise ValueError("roles must alternate")
        said = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return said + ("<assistant>" if add_generation_prompt else "")


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines),
        encoding="utf-8",
    )
    return path


def said(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


# --- packing ---------------------------------------------------------------------------------------------------


def test_packing_cuts_exact_pieces_and_drops_nothing() -> None:
    texts = [[1] * 30, [2] * 5, [3] * 70]
    pieces = pack_tokens(texts, samples=10, sequence_tokens=20, separator=0, seed=0)
    assert [len(piece) for piece in pieces] == [20] * 6
    whole = [token for piece in pack_tokens(texts, 1000, 1, 0, seed=0) for token in piece]
    assert len(whole) == 30 + 5 + 70 + 2  # two separators
    assert [token for piece in pieces[:5] for token in piece] == whole[:100]
    assert pieces[5] == whole[-20:]  # the last 7 tokens don't fill a piece, which reaches back for 13 more


def test_text_that_is_shorter_than_a_piece_gives_none() -> None:
    assert pack_tokens([[1] * 19], samples=5, sequence_tokens=20, separator=0, seed=0) == []


def test_text_longer_than_a_piece_is_used_whole() -> None:
    pieces = pack_tokens([list(range(100))], samples=5, sequence_tokens=20, separator=0, seed=0)
    assert [token for piece in pieces for token in piece] == list(range(100))


def test_no_more_pieces_than_asked_for() -> None:
    assert len(pack_tokens([[1] * 1000], samples=3, sequence_tokens=20, separator=0, seed=0)) == 3


def test_order_follows_the_seed() -> None:
    texts = [[value] * 10 for value in range(20)]
    first = pack_tokens(texts, 10, 20, None, seed=1)
    assert first == pack_tokens(texts, 10, 20, None, seed=1)
    assert first != pack_tokens(texts, 10, 20, None, seed=2)


# --- what is encoded --------------------------------------------------------------------------------------------


def test_texts_stay_as_they_are_without_a_template() -> None:
    assert [said(t) for t in encode([Text("a", "plain")], Tokenizer(), "f", False)] == ["plain"]


def test_chat_template_is_applied_as_a_server_does() -> None:
    """A prompt ends where its answer begins; a chat that is answered ends there."""
    texts = [
        Text("a", "plain"),
        Text("b", "", (("user", "q"), ("assistant", "r"))),
        Text("c", "", (("user", "q"),)),
    ]
    assert [said(tokens) for tokens in encode(texts, Tokenizer(), "f", True)] == [
        "<user>plain<assistant>",
        "<user>q<assistant>r",
        "<user>q<assistant>",
    ]


def test_a_chat_without_a_template_is_refused() -> None:
    chat = Text("c", "Hi", (("user", "Hi"),))
    with pytest.raises(UserInputError, match=r"team\.jsonl: 'c' is a chat .* set chat_template: true"):
        encode([chat], Tokenizer(), "team.jsonl", False)
    without = Tokenizer()
    without.chat_template = None
    with pytest.raises(UserInputError, match=r"team\.jsonl: chat_template is true .* tokenizer has none"):
        encode([chat], without, "team.jsonl", True)
    with pytest.raises(UserInputError, match=r"'c': .* template refuses it \(roles must alternate\)"):
        encode([Text("c", "raise", (("user", "raise"),))], Tokenizer(), "team.jsonl", True)


def request(folder: Path, *lines: Any, chat_template: bool = False, **recipe: Any) -> QuantizeRequest:
    return QuantizeRequest(
        scheme="awq",
        model_dir=folder,
        out_dir=folder / "out",
        calibration_file=write(folder / "calibration.jsonl", *lines),
        heldout_file=folder / "heldout.jsonl",
        chat_template=chat_template,
        recipe=QuantizeRecipe(
            group_size=64, **{"samples": 4, "sequence_tokens": 16, "min_effective_tokens": 48, **recipe}
        ),
    )


def test_record_counts_what_went_in(tmp_path: Path) -> None:
    asked = request(tmp_path, CHAT, {"id": "t", "text": "x" * 40}, chat_template=True)
    pieces, record = calibration_pieces(asked, Tokenizer())
    assert [len(piece) for piece in pieces] == [16] * 4
    assert record == {
        "file": str(asked.calibration_file),
        "sha256": sha256_file(asked.calibration_file),
        "texts": 2,
        "chats": 1,
        "chat_template": True,
        "available_tokens": len("<user>Hi there<assistant>Hello") + len("<user>") + 40 + len("<assistant>"),
        "effective_samples": 4,
        "effective_tokens": 64,
        "sequence_tokens": 16,
    }


def test_kv_scales_have_sequences_of_their_own(tmp_path: Path) -> None:
    kv = {"backend": "llmcompressor", "calibrate_kv_scales": True}
    lines = [{"id": f"t{n}", "text": f"{n}" * 40} for n in range(10)]
    asked = request(tmp_path, *lines, **kv, kv_samples=2, kv_sequence_tokens=128)
    pieces, record = kv_pieces(asked, Tokenizer())
    assert [len(piece) for piece in pieces] == [128] * 2
    assert (record["effective_tokens"], record["sequence_tokens"]) == (256, 128)
    assert len(calibration_pieces(asked, Tokenizer())[0][0]) == 16
    with pytest.raises(
        UserInputError, match=r"fill sequences of kv_sequence_tokens=512; min_effective_tokens=48"
    ):
        kv_pieces(request(tmp_path, *lines, **kv, kv_samples=2, kv_sequence_tokens=512), Tokenizer())


def test_coverage_is_judged_at_the_length_of_the_calibration(tmp_path: Path) -> None:
    """As long as held-out text reaches; never shorter than a window of its perplexity."""
    kv = {"backend": "llmcompressor", "calibrate_kv_scales": True}
    for length, wanted in ((1024, [1024] * 4), (4096, [4096]), (64, [256] * 16), (8192, [8192])):
        asked = request(tmp_path, **kv, kv_samples=2, kv_sequence_tokens=length)
        write(tmp_path / "heldout.jsonl", *({"id": f"h{n}", "text": f"{n}" * 999} for n in range(10)))
        found = [len(piece) for piece in coverage_pieces(asked, Tokenizer())]
        assert found == (wanted if length < 8192 else found) and sum(found) <= 2 * 4096
    write(tmp_path / "heldout.jsonl", {"id": "a", "text": "x" * 600}, {"id": "b", "text": "y" * 400})
    asked = request(tmp_path, **kv, kv_samples=2, kv_sequence_tokens=8192)
    assert [len(piece) for piece in coverage_pieces(asked, Tokenizer())] == [1001]


def test_one_short_line_is_refused_with_both_counts(tmp_path: Path) -> None:
    with pytest.raises(
        UserInputError,
        match=r"calibration\.jsonl: holds 20 tokens, of which 32 .*min_effective_tokens=48 are needed",
    ):
        calibration_pieces(request(tmp_path, {"id": "a", "text": "x" * 20}), Tokenizer())


# --- reading ---------------------------------------------------------------------------------------------------


def test_reading_keeps_order_skips_blank_lines_and_takes_chats(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"id": "b", "text": "two"},
        "",
        {"id": "a", "text": "one", "source": "ours"},
        CHAT,
    )
    assert read_texts(path) == [
        Text("b", "two"),
        Text("a", "one"),
        Text("c", "Hi there\nHello", (("user", "Hi there"), ("assistant", "Hello"))),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "text": "ok"', "line 2, column 25: not valid JSON"),
        ('["x", "ok"]', "line 2: .*allowed is one JSON object per line"),
        ('{"id": "x"}', "line 2: key 'text' is missing"),
        ('{"id": 3, "text": "ok"}', "line 2: id: 3; allowed is a text"),
        ('{"id": "x", "text": "  "}', 'line 2: text: "  "; allowed is a text that isn'),
        ('{"id": "first", "text": "ok"}', "line 2: id: 'first' is already in line 1"),
        ('{"id": "x", "text": "ok", "messages": []}', "line 2: has text and messages"),
        ('{"id": "x", "messages": []}', r"line 2: messages: \[\]; allowed is a list"),
        ('{"id": "x", "messages": ["hi"]}', 'line 2: messages: "hi"; allowed is an object'),
        ('{"id": "x", "messages": [{"role": "tool", "content": "hi"}]}', "line 2: role: .* system, user, assistant"),
        ('{"id": "x", "messages": [{"role": "user"}]}', "line 2: key 'content' is missing"),
    ],
)  # fmt: skip
def test_malformed_line_is_named_by_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_texts(write(tmp_path / "texts.jsonl", {"id": "first", "text": "fine"}, line))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no such file"):
        read_texts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserInputError, match="empty"):
        read_texts(write(tmp_path / "empty.jsonl", ""))


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """U+2028 inside a JSON string is text."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": "a", "text": "one\u2028two"}\n{"id": "b", "text": "three"}\n', encoding="utf-8")
    assert [text.text for text in read_texts(path)] == ["one\u2028two", "three"]


# --- overlap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heldout", "how"),
    [
        (LONG.upper().replace(" ", "  "), "word for word"),
        (LONG.replace("the miller", "the old miller"), r"\d+% of its sequences"),
        ("Two words", "word for word"),
    ],
)
def test_heldout_text_in_the_calibration_text_is_refused(tmp_path: Path, heldout: str, how: str) -> None:
    calibration = write(
        tmp_path / "calibration.jsonl",
        {"id": "a", "text": f"Once. {LONG} tired."},
        {"id": "b", "text": "two words"},
    )
    clean = {"id": "h", "text": "Nothing of this is anywhere else to be found in the file"}
    refuse_overlap(calibration, write(tmp_path / "heldout.jsonl", clean))
    bad = write(tmp_path / "heldout.jsonl", clean, {"id": "i", "text": heldout})
    with pytest.raises(
        UserInputError, match=rf"heldout\.jsonl: text 'i' is in .*calibration\.jsonl too, .*{how}"
    ):
        refuse_overlap(calibration, bad)


def test_calibration_text_that_holds_an_eval_item_is_refused(tmp_path: Path) -> None:
    """What the stage `quantize` checks before an hour is spent; as text, as a chat, and nearly."""
    settings = load_settings(["profile=demo"], ROOT)
    folder = ROOT / str(settings.evalset.folder)
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()]
    prompt = next(item["prompt"] for item in items if len(item["prompt"].split()) > 40)
    words = prompt.split()
    for line in (
        {"id": "leak", "text": f"Remember: {prompt}"},
        {"id": "leak", "messages": [{"role": "user", "content": prompt}]},
        {"id": "leak", "text": " ".join([*words[:-3], "something", "else"])},
    ):
        path = write(tmp_path / "calibration.jsonl", {"id": "a", "text": "Nothing."}, line)
        calibration = settings.calibration.model_copy(update={"file": str(path)})
        evalset = settings.evalset.model_copy(update={"folder": str(folder)})
        with pytest.raises(UserInputError, match="is also in the text 'leak'"):
            refuse_leaks(settings.model_copy(update={"calibration": calibration, "evalset": evalset}))
