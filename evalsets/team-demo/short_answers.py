"""Questions whose answer is generated: a word or a number, after three answered questions of the same kind.

Only facts with one short right answer are asked (an opposite has several, a capital has one). The three examples of a kind are
facts that are never asked themselves.
"""

from __future__ import annotations

from typing import Any

from fact_tables import read_sections
from items import ranked, slug

EXAMPLES = 3
SUMS = 24
# facts/FILE.txt and its section -> how it is asked.
KINDS = {
    ("knowledge", "capital"): "What is the capital of {}?",
    ("knowledge", "symbol"): "What is the chemical symbol for {}?",
    ("knowledge", "currency"): "Which money do people pay with in {}?",
    ("language", "plural"): "What is the plural of the word {}?",
    ("language", "past"): "Every day we {}. What did we do yesterday?",
    ("chinese", "capital"): "{}的首都是哪里？",
}


def short_items() -> list[dict[str, Any]]:
    """The items of the task `team_demo_short`: id, slice, cluster, messages, answer."""
    items: list[dict[str, Any]] = []
    for (file, section), question in KINDS.items():
        found = next(one for one in read_sections(file) if one.name == section)
        facts = {subject: answer for subject, answer, _ in found.rows}
        items += _kind("chinese" if file == "chinese" else file, section, question, facts)
    sums = {f"{a} + {b}": str(a + b) for a in range(6, 30) for b in range(3, 15) if a > b}
    kept = ranked("short sums", sums)[: SUMS + EXAMPLES]
    items += _kind("arithmetic", "sum", "What is {}?", {text: sums[text] for text in kept})
    return items


def _turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    """A question as a user's turn, and its answer as the assistant's where it is given."""
    asked = {"role": "user", "content": question}
    return [asked] if answer is None else [asked, {"role": "assistant", "content": answer}]


def _kind(slice_name: str, section: str, question: str, facts: dict[str, str]) -> list[dict[str, Any]]:
    names = ranked(f"short {section}", facts)
    shown, asked = names[:EXAMPLES], set(names[EXAMPLES:])
    examples = [turn for name in shown for turn in _turns(question.format(name), facts[name])]
    return [
        {
            "id": f"short-{slice_name}-{section}-{slug(name.replace(' + ', ' plus '))}",
            "slice": slice_name,
            "cluster": f"short-{slice_name}-{section}-{slug(name.replace(' + ', ' plus '))}",
            "messages": [*examples, *_turns(question.format(name))],
            "answer": right,
        }
        for name, right in facts.items()
        if name in asked
    ]
