"""Eval items: read with errors that point at the line, sampled the same for every variant, kept apart.

Pure Python: `quantgate doctor` and the stages use it without lm-eval. Why it is strict: a doubled item or a sample that
differs between two variants breaks the pairing, and an item that is also calibration text measures what was tuned on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UserInputError
from pipeline.texts import (
    Match,
    TextIndex,
    chat_turns,
    is_telling,
    records,
    refuse_second,
    shown,
    text_value,
    value_of,
    words_of,
)

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
    """An eval item found in a text."""

    item_id: str
    match: Match


def load_items(path: str | Path, kind: TaskKind = "multiple_choice") -> list[Item]:
    """Read a set's items in file order, as a task of `kind` needs them. Further keys are a team's own and ignored.

    Every fault is a `UserInputError` with file, line, key, value and what is allowed.
    """
    target = Path(path)
    items: list[Item] = []
    lines: dict[str, int] = {}
    for line, record in records(target, "eval items"):
        item = _item(record, target, line, kind)
        refuse_second(item.id, line, lines, target)
        items.append(item)
    if len(items) == 1:
        raise UserInputError(f"{target}: holds only one item; a comparison of two models needs at least 2")
    return items


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


def scoring_order(ids: Iterable[str], seed: int) -> list[str]:
    """Items' ids in an order that depends on seed and ids alone, for a run that may stop before the end.

    Any first part of it is a random sample of all, which is what makes stopping early fair.
    """
    return sorted(ids, key=lambda one: (_rank(seed, f"order\0{one}"), one))


def find_leaks(items: Sequence[Item], texts: Mapping[str, str]) -> list[Leak]:
    """Eval items that are in one of `texts`: word for word, or at least half of their word (or CJK character) n-grams.

    A prompt that is too short to mean anything alone is looked for together with its right answer. One leak per item: the worst.
    Items of one id are parts of one item, of which the first that is found counts.
    """
    index = TextIndex(texts)
    found: dict[str, Match] = {}
    for item in items:
        match = None if item.id in found else _match(item, index)
        if match is not None:
            found[item.id] = match
    return [Leak(name, match) for name, match in found.items()]


def check_no_leak(items: Sequence[Item], texts: Mapping[str, str]) -> None:
    """Raise `UserInputError` naming the first item that is also in `texts`, and how many more there are."""
    leaks = find_leaks(items, texts)
    if not leaks:
        return
    first = leaks[0]
    more = f"; {len(leaks) - 1} more items leak too" if len(leaks) > 1 else ""
    raise UserInputError(
        f"eval item {first.item_id!r} is also in the text {first.match.text_id!r} ({first.match.how()}); remove one of the two, "
        f"or quality is measured on what the model was tuned on{more}"
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


def _item(record: Mapping[str, Any], path: Path, line: int, kind: TaskKind) -> Item:
    identity, slice_name, cluster = (
        text_value(record, key, path, line) for key in ("id", "slice", "cluster")
    )
    if "messages" in record and kind != "loglikelihood_rolling":
        prompt = _asked_in_chat(record, path, line)
    else:
        prompt = text_value(record, "text" if kind == "loglikelihood_rolling" else "prompt", path, line)
    if kind == "loglikelihood_rolling":
        return Item(identity, slice_name, cluster, prompt, (), 0)
    if kind == "generate_until":
        expected = text_value(record, "answer", path, line)
        return Item(identity, slice_name, cluster, prompt, (), 0, expected)
    choices = value_of(record, "choices", path, line)
    where = f"{path}, line {line}, item {identity!r}"
    if not isinstance(choices, list) or not all(
        isinstance(choice, str) and choice.strip() for choice in choices
    ):
        raise UserInputError(
            f"{where}: choices: {shown(choices)}; allowed is a list of texts that aren't empty"
        )
    if len(choices) < 2:
        raise UserInputError(f"{where}: choices: {shown(choices)}; allowed are 2 or more")
    for position, choice in enumerate(choices):
        first = choices.index(choice)
        if first != position:
            raise UserInputError(
                f"{where}: choices: {choice!r} is choice {first} and choice {position}; allowed is once"
            )
    answer = value_of(record, "answer", path, line)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserInputError(
            f"{where}: answer: {shown(answer)}; allowed is the index of the right choice, 0 to {len(choices) - 1}"
        )
    return Item(identity, slice_name, cluster, prompt, tuple(choices), answer)


def _asked_in_chat(record: Mapping[str, Any], path: Path, line: int) -> str:
    """What is said in an item's chat, a line each; the model's chat template puts its form around it."""
    if "prompt" in record:
        raise UserInputError(f"{path}, line {line}: has prompt and messages; allowed is one of the two")
    turns = chat_turns(record["messages"], path, line)
    if turns[-1][0] != "user":
        raise UserInputError(
            f"{path}, line {line}: messages: the last turn is the {turns[-1][0]}'s; allowed is the user's, which is answered"
        )
    return "\n".join(content for _, content in turns)


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


def _match(item: Item, index: TextIndex) -> Match | None:
    """The worst match of one item, or None."""
    tokens = words_of(item.prompt)
    if not is_telling(tokens):
        tokens = words_of(f"{item.prompt}{'' if item.choices else ' '}{item.right}")
    return index.find(tokens) if is_telling(tokens) else None
