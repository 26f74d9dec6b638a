"""What goes into calibration is exactly what was asked for, and is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.quantize.calibration import Text, pack_tokens, read_texts, refuse_too_little


def test_packing_cuts_exact_pieces_and_drops_nothing_before_the_end() -> None:
    texts = [[1] * 30, [2] * 5, [3] * 70]
    pieces = pack_tokens(texts, samples=10, sequence_tokens=20, separator=0, seed=0)
    assert [len(piece) for piece in pieces] == [20] * 5
    stream = [token for piece in pieces for token in piece]
    stream = [token for piece in pieces for token in piece]
    whole = [token for piece in pack_tokens(texts, 1000, 1, 0, seed=0) for token in piece]
    assert len(whole) == 30 + 5 + 70 + 2  # two separators
    assert stream == whole[:100]  # the last 7 tokens don't fill a piece


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


def test_too_little_text_is_refused_with_both_counts() -> None:
    with pytest.raises(
        UserInputError, match=r"calibration\.jsonl: gives 40 calibration tokens .* min_effective_tokens=41"
    ):
        refuse_too_little([[1] * 20, [1] * 20], 41, "calibration.jsonl")
    assert refuse_too_little([[1] * 20, [1] * 20], 40, "calibration.jsonl") == 40


def test_reading_keeps_order_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": "b", "text": "two"}\n\n{"id": "a", "text": "one", "source": "ours"}\n')
    assert read_texts(path) == [Text("b", "two"), Text("a", "one")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "text": "ok"', "line 2: not valid JSON"),
        ('["x", "ok"]', "line 2: must be a JSON object"),
        ('{"id": "x"}', "line 2: text=None"),
        ('{"id": 3, "text": "ok"}', "line 2: id=3"),
        ('{"id": "x", "text": "  "}', "line 2: text='  '"),
        ('{"id": "first", "text": "ok"}', "line 2: id 'first' was used in line 1"),
    ],
)
def test_malformed_line_is_named_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": "first", "text": "fine"}\n' + line + "\n")
    with pytest.raises(UserInputError, match=message):
        read_texts(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no such file"):
        read_texts(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserInputError, match="holds no texts"):
        read_texts(tmp_path / "empty.jsonl")


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    """U+2028 inside a JSON string is text."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": "a", "text": "one\u2028two"}\n{"id": "b", "text": "three"}\n', encoding="utf-8")
    assert [text.text for text in read_texts(path)] == ["one\u2028two", "three"]
