"""The one shape that every item has, and the choices that come from a hash.

A hash of names decides distractors and positions, and no random state does: a fact that is added or removed leaves the
other items as they were, on every Python version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SEED = 20261129
CHOICES = 4


@dataclass(frozen=True)
class Question:
    """An item before its choices have an order. `wrong` holds exactly the distractors that will be used."""

    slice: str
    section: str
    subject: str
    prompt: str
    right: str
    wrong: tuple[str, ...]
    source: str  # what it shares with other questions: a fact or a passage

    def __post_init__(self) -> None:
        options = {self.right, *self.wrong}
        if len(self.wrong) != CHOICES - 1 or len(options) != CHOICES:
            raise ValueError(
                f"{self.slice}/{self.section}, {self.subject!r}: needs 4 different choices, has {sorted(options)}"
            )
        for choice in options:
            if any(other.startswith(choice) for other in options - {choice}):
                raise ValueError(
                    f"{self.slice}/{self.section}, {self.subject!r}: {choice!r} begins another choice"
                )
        if self.prompt != self.prompt.strip():
            raise ValueError(
                f"{self.slice}/{self.section}, {self.subject!r}: the prompt begins or ends with white space"
            )


def ranked(key: str, options: Iterable[str]) -> list[str]:
    """`options` in an order that depends on `key` alone."""
    return sorted(options, key=lambda option: _hash(f"{key}|{option}"))


def distractors(key: str, right: str, options: Iterable[str]) -> tuple[str, ...]:
    """Three of `options`, chosen by `key`. None begins another choice or is begun by one.

    A model can't give " 16" more than it gives " 1", its beginning, where both are made of the same tokens: such an item
    would have its answer by construction.
    """
    chosen = [right]
    for option in ranked(key, options):
        if not any(option.startswith(other) or other.startswith(option) for other in chosen):
            chosen.append(option)
    return tuple(chosen[1:CHOICES])


def slug(text: str) -> str:
    """A short ASCII name; a piece of the text's hash stands in for what is cut off or isn't ASCII."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    name = "-".join(words[:4])
    complete = len(words) <= 4 and text.isascii() and "-".join(words) == text.lower().replace(" ", "-")
    return name if complete else f"{name}-{_hash(text)[:6]}".strip("-")


def as_items(questions: Sequence[Question]) -> list[dict[str, object]]:
    """Finished items. In each slice every answer position is used equally often, to within one."""
    items: list[dict[str, object]] = []
    for name in dict.fromkeys(question.slice for question in questions):
        members = {_identity(question): question for question in questions if question.slice == name}
        position = {identity: place % CHOICES for place, identity in enumerate(ranked("position", members))}
        for identity, question in members.items():
            choices = ranked(identity, question.wrong)
            choices.insert(position[identity], question.right)
            items.append(
                {
                    "id": identity,
                    "slice": name,
                    "cluster": f"{question.section}-{slug(question.source)}",
                    "prompt": question.prompt,
                    "choices": [_spaced(choice, name) for choice in choices],
                    "answer": position[identity],
                }
            )
    if len(items) != len(questions):
        raise ValueError("two questions have one id")
    return items


def _identity(question: Question) -> str:
    return f"{question.slice}-{question.section}-{slug(question.subject)}"


def _spaced(choice: str, slice_name: str) -> str:
    """The choice as it follows the prompt: after a space, in Chinese after none. The task's delimiter is empty."""
    return choice if slice_name == "chinese" else f" {choice}"


def _hash(text: str) -> str:
    return hashlib.sha256(f"{SEED}|{text}".encode()).hexdigest()
