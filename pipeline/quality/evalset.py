"""Eval items and the texts around them: read with errors that point at the line, sampled the same for every variant, kept apart.

Pure Python: `quantgate doctor` and the stages use it without lm-eval. Why it is strict: a doubled item or a sample that
differs between two variants breaks the pairing, and an item that is also calibration text measures what was tuned on.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
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

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
# Operators are kept, sentence punctuation isn't: `a + b` and `a - b` differ, "Yes, it is." and "yes it is" don't.
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|[-+*/%=<>&|^~]")
_IS_CJK = re.compile(rf"[{_CJK}]")
_SHOWN_CHARS = 60


TaskKind = Literal["multiple_choice", "generate_until", "loglikelihood_rolling"]
"""lm-eval's output_type: choices scored, an answer generated, a text's own likelihood."""


@dataclass(frozen=True)
class Item:
    """One item. `cluster` names the source it shares with others.

    `answer` is the index of the right choice; where the answer is generated there are no choices, and `expected` is its
    text; a text whose likelihood is measured has neither.
    """

    id: str
    slice: str
    cluster: str
    prompt: str
    choices: tuple[str, ...]
    answer: int
    expected: str = ""

    @property
    def right(self) -> str:
        """The right answer as text."""
        return self.choices[self.answer] if self.choices else self.expected


@dataclass(frozen=True)
class Leak:
    """An eval item found in a text. `overlap` is the share of the item's n-grams that the text has, 1.0 for an exact match."""

    item_id: str
    text_id: str
    kind: Literal["exact", "near"]
    overlap: float


def load_items(path: str | Path, kind: TaskKind = "multiple_choice") -> list[Item]:
    """Read a set's items in file order, as a task of `kind` needs them. Further keys are a team's own and ignored.

    Every fault is a `UserInputError` with file, line, key, value and what is allowed.
    """
    target = Path(path)
    items: list[Item] = []
    lines: dict[str, int] = {}
    for line, record in _records(target, "eval items"):
        item = _item(record, target, line, kind)
        _refuse_second(item.id, line, lines, target)
        items.append(item)
    if len(items) == 1:
        raise UserInputError(f"{target}: holds only one item; a comparison of two models needs at least 2")
    return items


def load_texts(path: str | Path) -> dict[str, str]:
    """Read a JSONL of {"id", "text"} (calibration or held-out text) as id -> text, with the errors of `load_items`."""
    target = Path(path)
    texts: dict[str, str] = {}
    lines: dict[str, int] = {}
    for line, record in _records(target, "texts"):
        identity = _text_value(record, "id", target, line)
        _refuse_second(identity, line, lines, target)
        texts[identity] = _text_value(record, "text", target, line)
    return texts


def sample_items(
    items: Sequence[Item], n: int | None, seed: int, per_slice: Mapping[str, int] | None = None
) -> list[Item]:
    """`n` items in their own order, stratified by slice: proportional, at least one of each. None takes all.

    `per_slice` fixes the number of some slices, and the others share the rest.

    One item of each cluster is taken before the second of any: items of one source tell less than others. Otherwise an item's
    rank is a hash of seed and id, so the sample is the same for every variant, machine and Python version, and an item added
    elsewhere in the file moves at most the items at the edge. Raises `UserInputError` for an `n` that can't be.
    """
    if n is None:
        return list(items)
    by_slice: dict[str, list[Item]] = {}
    for item in items:
        by_slice.setdefault(item.slice, []).append(item)
    quota = dict(per_slice or {})
    for name, count in quota.items():
        if not 1 <= count <= len(by_slice.get(name, ())):
            raise UserInputError(
                f"evalset.slice_items.{name}: {count}; allowed are slices of the set ({', '.join(sorted(by_slice))}) and 1 to "
                "their number of items"
            )
    others = {name: len(members) for name, members in by_slice.items() if name not in quota}
    fixed = sum(quota.values())
    if not fixed + len(others) <= n <= fixed + sum(others.values()):
        raise UserInputError(
            f"evalset.items: {n}; allowed is {fixed + len(others)} (one per slice) to {fixed + sum(others.values())} "
            f"({'all items' if not quota else 'all items of the slices without a number'}), or null for all"
        )
    if others:
        quota |= _quotas(others, n - fixed)
    chosen: set[str] = set()
    for name, members in by_slice.items():
        ranked = sorted(members, key=lambda item: (_rank(seed, item.id), item.id))
        taken: Counter[str] = Counter()
        turns = {}
        for item in ranked:
            turns[item.id] = taken[item.cluster]
            taken[item.cluster] += 1
        ranked.sort(key=lambda item: turns[item.id])  # stable: within a turn the hash's order stays
        chosen.update(item.id for item in ranked[: quota[name]])
    return [item for item in items if item.id in chosen]


def scoring_order(items: Sequence[Item], seed: int) -> list[Item]:
    """The items in an order that depends on seed and ids alone, for a run that may stop before the end.

    Any first part of it is a random sample of all, which is what makes stopping early fair.
    """
    return sorted(items, key=lambda item: (_rank(seed, f"order\0{item.id}"), item.id))


def find_leaks(items: Sequence[Item], texts: Mapping[str, str]) -> list[Leak]:
    """Eval items that are in one of `texts`: word for word, or at least half of their word (or CJK character) n-grams.

    Case, width, spacing and sentence punctuation don't count. A prompt that is too short to mean anything alone is looked
    for together with its right answer. One leak per item: the worst.
    """
    streams = {name: _tokens(text) for name, text in texts.items()}
    joined = {name: f" {' '.join(tokens)} " for name, tokens in streams.items()}
    index: dict[tuple[str, ...], list[str]] = {}
    for name, tokens in streams.items():
        for gram in _grams(tokens):
            index.setdefault(gram, []).append(name)
    leaks = (_leak(item, joined, index) for item in items)
    return [leak for leak in leaks if leak is not None]


def check_no_leak(items: Sequence[Item], texts: Mapping[str, str]) -> None:
    """Raise `UserInputError` naming the first item that is also in `texts`, and how many more there are."""
    leaks = find_leaks(items, texts)
    if not leaks:
        return
    first = leaks[0]
    how = (
        "word for word"
        if first.kind == "exact"
        else f"{first.overlap:.0%} of its sequences of {NEAR_WORDS} words or {NEAR_CJK} CJK characters"
    )
    more = f"; {len(leaks) - 1} more items leak too" if len(leaks) > 1 else ""
    raise UserInputError(
        f"eval item {first.item_id!r} is also in the text {first.text_id!r} ({how}); remove one of the two, or quality is "
        f"measured on what the model was tuned on{more}"
    )


def describe(items: Sequence[Item]) -> dict[str, Any]:
    """Counts for a person: items, items per slice, clusters, items per answer position, and a SHA-256 of the content."""
    content = json.dumps([astuple(item) for item in items], ensure_ascii=False).encode()
    return {
        "items": len(items),
        "slices": dict(sorted(Counter(item.slice for item in items).items())),
        "clusters": len({(item.slice, item.cluster) for item in items}),
        "answers": dict(sorted(Counter(item.answer for item in items).items())),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _records(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
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
            raise UserInputError(
                f"{path}, line {line}: {_shown(record)}; allowed is one JSON object per line"
            )
        found = True
        yield line, record
    if not found:
        raise UserInputError(f"{path}: empty; it must hold one JSON object per line ({what})")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice}: given twice in one object; allowed is once")
    return record


def _item(record: Mapping[str, Any], path: Path, line: int, kind: TaskKind) -> Item:
    text_key = "text" if kind == "loglikelihood_rolling" else "prompt"
    identity, slice_name, cluster, prompt = (
        _text_value(record, key, path, line) for key in ("id", "slice", "cluster", text_key)
    )
    if kind == "loglikelihood_rolling":
        return Item(identity, slice_name, cluster, prompt, (), 0)
    if kind == "generate_until":
        expected = _text_value(record, "answer", path, line)
        return Item(identity, slice_name, cluster, prompt, (), 0, expected)
    choices = _value(record, "choices", path, line)
    where = f"{path}, line {line}, item {identity!r}"
    if not isinstance(choices, list) or not all(
        isinstance(choice, str) and choice.strip() for choice in choices
    ):
        raise UserInputError(
            f"{where}: choices: {_shown(choices)}; allowed is a list of texts that aren't empty"
        )
    if len(choices) < 2:
        raise UserInputError(f"{where}: choices: {_shown(choices)}; allowed are 2 or more")
    for position, choice in enumerate(choices):
        first = choices.index(choice)
        if first != position:
            raise UserInputError(
                f"{where}: choices: {choice!r} is choice {first} and choice {position}; allowed is once"
            )
    answer = _value(record, "answer", path, line)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserInputError(
            f"{where}: answer: {_shown(answer)}; allowed is the index of the right choice, 0 to {len(choices) - 1}"
        )
    return Item(identity, slice_name, cluster, prompt, tuple(choices), answer)


def _value(record: Mapping[str, Any], key: str, path: Path, line: int) -> Any:
    if key not in record:
        there = ", ".join(sorted(record)) or "none"
        raise UserInputError(f"{path}, line {line}: key {key!r} is missing; keys there: {there}")
    return record[key]


def _text_value(record: Mapping[str, Any], key: str, path: Path, line: int) -> str:
    value = _value(record, key, path, line)
    if not isinstance(value, str) or not value.strip():
        raise UserInputError(
            f"{path}, line {line}: {key}: {_shown(value)}; allowed is a text that isn't empty"
        )
    return value


def _refuse_second(identity: str, line: int, lines: dict[str, int], path: Path) -> None:
    first = lines.setdefault(identity, line)
    if first != line:
        raise UserInputError(
            f"{path}, line {line}: id: {identity!r} is already in line {first}; allowed is once per file"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def _quotas(sizes: Mapping[str, int], n: int) -> dict[str, int]:
    """Seats per slice by the largest remainder over one guaranteed seat each. Ties go by name."""
    total = sum(sizes.values())
    exact = {name: n * size / total for name, size in sizes.items()}
    quota = {name: max(1, int(share)) for name, share in exact.items()}
    while sum(quota.values()) != n:
        step = 1 if sum(quota.values()) < n else -1
        open_to = [name for name in sorted(sizes) if 1 <= quota[name] + step <= sizes[name]]
        best = max(open_to, key=lambda name: step * (exact[name] - quota[name]))
        quota[best] += step
    return quota


def _rank(seed: int, identity: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{identity}".encode()).digest()


def _tokens(text: str) -> list[str]:
    """Words, single CJK characters and operators, without case or width."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def _grams(tokens: Sequence[str]) -> set[tuple[str, ...]]:
    """All n-grams of the words and of the CJK characters, each kind among its own so that a digit doesn't hide a match."""
    cjk = [token for token in tokens if _IS_CJK.match(token)]
    words = [token for token in tokens if not _IS_CJK.match(token)]
    grams: set[tuple[str, ...]] = set()
    for stream, size in ((words, NEAR_WORDS), (cjk, NEAR_CJK)):
        grams.update(tuple(stream[start : start + size]) for start in range(len(stream) - size + 1))
    return grams


def _is_telling(tokens: Sequence[str]) -> bool:
    cjk = sum(1 for token in tokens if _IS_CJK.match(token))
    words = sum(1 for token in tokens if token.isalnum()) - cjk
    return words >= EXACT_MIN_WORDS or cjk >= EXACT_MIN_CJK


def _leak(item: Item, joined: Mapping[str, str], index: Mapping[tuple[str, ...], list[str]]) -> Leak | None:
    """The worst leak of one item, or None."""
    tokens = _tokens(item.prompt)
    if not _is_telling(tokens):
        tokens = _tokens(f"{item.prompt}{'' if item.choices else ' '}{item.right}")
    if not _is_telling(tokens):
        return None
    needle = f" {' '.join(tokens)} "
    for name, text in joined.items():
        if needle in text:
            return Leak(item.id, name, "exact", 1.0)
    grams = _grams(tokens)
    hits = Counter(name for gram in grams for name in index.get(gram, ()))
    if not hits:
        return None
    name, count = min(hits.items(), key=lambda entry: (-entry[1], entry[0]))
    share = count / len(grams)
    return Leak(item.id, name, "near", share) if share >= NEAR_SHARE else None
