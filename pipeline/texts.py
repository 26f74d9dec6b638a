"""JSONL files of items and texts: read with errors that point at the line, and searched for text that is in two places.

Standard library only: the stages, `quantgate doctor` and the quantizers' own environments all read texts with this.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UserInputError

# Shorter texts are shared by chance ("the capital of France is"); from here on a match is the same text.
EXACT_MIN_WORDS = 6
EXACT_MIN_CJK = 12
# 8 words: the length at which PaLM's contamination check counts n-grams (arXiv:2204.02311, section 8). A CJK
# character carries about two thirds of a word, hence 12.
NEAR_WORDS = 8
NEAR_CJK = 12
NEAR_SHARE = 0.5

ROLES = ("system", "user", "assistant")

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
# Operators are kept, sentence punctuation isn't: `a + b` and `a - b` differ, "Yes, it is." and "yes it is" don't.
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|[-+*/%=<>&|^~]")
_IS_CJK = re.compile(rf"[{_CJK}]")
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Text:
    """One line of a text file: {"id", "text"}, or a chat {"id", "messages"} as chat completions have it."""

    id: str
    text: str
    """The text; of a chat what was said, a line each, without the template around it."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of a chat's turns; empty for plain text."""


@dataclass(frozen=True)
class Match:
    """A text found in another one. `overlap` is the share of its n-grams that the other has, 1.0 for an exact match."""

    text_id: str
    kind: Literal["exact", "near"]
    overlap: float

    def how(self) -> str:
        """For a message: word for word, or how much of it."""
        if self.kind == "exact":
            return "word for word"
        return f"{self.overlap:.0%} of its sequences of {NEAR_WORDS} words or {NEAR_CJK} CJK characters"


class TextIndex:
    """Texts by name, ready to be searched. Case, width, spacing and sentence punctuation don't count."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        streams = {name: words_of(text) for name, text in texts.items()}
        self._joined = {name: f" {' '.join(tokens)} " for name, tokens in streams.items()}
        self._index: dict[tuple[str, ...], list[str]] = {}
        for name, tokens in streams.items():
            for gram in _grams(tokens):
                self._index.setdefault(gram, []).append(name)

    def find(self, tokens: Sequence[str]) -> Match | None:
        """The text that holds `tokens` (of `words_of`) word for word, else the one with at least half of their n-grams."""
        needle = f" {' '.join(tokens)} "
        for name, text in self._joined.items():
            if needle in text:
                return Match(name, "exact", 1.0)
        grams = _grams(tokens)
        hits = Counter(name for gram in grams for name in self._index.get(gram, ()))
        if not hits:
            return None
        name, count = min(hits.items(), key=lambda entry: (-entry[1], entry[0]))
        share = count / len(grams)
        return Match(name, "near", share) if share >= NEAR_SHARE else None


def read_texts(path: str | Path) -> list[Text]:
    """Read a JSONL of {"id", "text"} or {"id", "messages": [{"role", "content"}, ...]}; further keys are ignored.

    Every fault is a `UserInputError` with file, line, key, value and what is allowed.
    """
    target = Path(path)
    texts: list[Text] = []
    lines: dict[str, int] = {}
    for line, record in records(target, "texts: id and text, or id and messages"):
        identity = text_value(record, "id", target, line)
        refuse_second(identity, line, lines, target)
        if "messages" in record and "text" in record:
            raise UserInputError(f"{target}, line {line}: has text and messages; allowed is one of the two")
        if "messages" in record:
            messages = chat_turns(record["messages"], target, line)
            texts.append(Text(identity, "\n".join(content for _, content in messages), messages))
        else:
            texts.append(Text(identity, text_value(record, "text", target, line)))
    return texts


def load_texts(path: str | Path) -> dict[str, str]:
    """The texts of `read_texts` as id -> text."""
    return {text.id: text.text for text in read_texts(path)}


def records(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of every line that isn't blank."""
    if not path.is_file():
        raise UserInputError(f"{path}: no such file; it must hold one JSON object per line ({what})")
    found = False
    # Lines end at \n only: str.splitlines would also cut inside a JSON string that holds U+2028.
    for line, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
        except UnicodeDecodeError as error:
            raise UserInputError(f"{path}, line {line}: not UTF-8 (byte {error.start + 1})") from None
        except json.JSONDecodeError as error:
            raise UserInputError(
                f"{path}, line {line}, column {error.colno}: not valid JSON ({error.msg})"
            ) from None
        except ValueError as error:
            raise UserInputError(f"{path}, line {line}: {error}") from None
        if not isinstance(record, dict):
            raise UserInputError(f"{path}, line {line}: {shown(record)}; allowed is one JSON object per line")
        found = True
        yield line, record
    if not found:
        raise UserInputError(f"{path}: empty; it must hold one JSON object per line ({what})")


def value_of(record: Mapping[str, Any], key: str, path: Path, line: int) -> Any:
    """The value of `key`, or a `UserInputError` that lists the keys there are."""
    if key not in record:
        there = ", ".join(sorted(record)) or "none"
        raise UserInputError(f"{path}, line {line}: key {key!r} is missing; keys there: {there}")
    return record[key]


def text_value(record: Mapping[str, Any], key: str, path: Path, line: int) -> str:
    """The text of `key`, which must not be empty."""
    value = value_of(record, key, path, line)
    if not isinstance(value, str) or not value.strip():
        raise UserInputError(
            f"{path}, line {line}: {key}: {shown(value)}; allowed is a text that isn't empty"
        )
    return value


def refuse_second(identity: str, line: int, lines: dict[str, int], path: Path) -> None:
    """Raise `UserInputError` for an id that `lines` (id -> line, kept up here) already has."""
    first = lines.setdefault(identity, line)
    if first != line:
        raise UserInputError(
            f"{path}, line {line}: id: {identity!r} is already in line {first}; allowed is once per file"
        )


def shown(value: Any) -> str:
    """A value as it stands in a message: JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def words_of(text: str) -> list[str]:
    """Words, single CJK characters and operators, without case or width."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def is_telling(tokens: Sequence[str]) -> bool:
    """Whether a match of so few tokens can still be no coincidence."""
    cjk = sum(1 for token in tokens if _IS_CJK.match(token))
    words = sum(1 for token in tokens if token.isalnum()) - cjk
    return words >= EXACT_MIN_WORDS or cjk >= EXACT_MIN_CJK


def chat_turns(value: Any, path: Path, line: int) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UserInputError(
            f"{path}, line {line}: messages: {shown(value)}; allowed is a list of {{role, content}} that isn't empty"
        )
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise UserInputError(
                f"{path}, line {line}: messages: {shown(message)}; allowed is an object with role and content"
            )
        role = text_value(message, "role", path, line)
        if role not in ROLES:
            raise UserInputError(f"{path}, line {line}: role: {shown(role)}; allowed are {', '.join(ROLES)}")
        messages.append((role, text_value(message, "content", path, line)))
    return tuple(messages)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice}: given twice in one object; allowed is once")
    return record


def _grams(tokens: Sequence[str]) -> set[tuple[str, ...]]:
    """All n-grams of the words and of the CJK characters, each kind among its own so that a digit doesn't hide a match."""
    cjk = [token for token in tokens if _IS_CJK.match(token)]
    words = [token for token in tokens if not _IS_CJK.match(token)]
    grams: set[tuple[str, ...]] = set()
    for stream, size in ((words, NEAR_WORDS), (cjk, NEAR_CJK)):
        grams.update(tuple(stream[start : start + size]) for start in range(len(stream) - size + 1))
    return grams
