"""Questions whose answer is generated: a word or a number, after three answered questions of the same kind.

Only facts with one short right answer are asked (an opposite has several, a capital has one). The three examples of a kind are
facts that are never asked themselves.
"""

from __future__ import annotations

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


def short_items() -> list[dict[str, str]]:
    """The items of the task `team_demo_short`: id, slice, cluster, prompt, answer."""
    items: list[dict[str, str]] = []
    for (file, section), question in KINDS.items():
        found = next(one for one in read_sections(file) if one.name == section)
        facts = {subject: answer for subject, answer, _ in found.rows}
        items += _kind("chinese" if file == "chinese" else file, section, question, facts)
    sums = {f"{a} + {b}": str(a + b) for a in range(6, 30) for b in range(3, 15) if a > b}
    kept = ranked("short sums", sums)[: SUMS + EXAMPLES]
    items += _kind("arithmetic", "sum", "What is {}?", {text: sums[text] for text in kept})
    return items


def _kind(slice_name: str, section: str, question: str, facts: dict[str, str]) -> list[dict[str, str]]:
    names = ranked(f"short {section}", facts)
    shown, asked = names[:EXAMPLES], set(names[EXAMPLES:])
    ask, answer = ("问：", "答：") if slice_name == "chinese" else ("Question: ", "Answer:")
    space = "" if slice_name == "chinese" else " "
    examples = "".join(f"{ask}{question.format(name)}\n{answer}{space}{facts[name]}\n\n" for name in shown)
    return [
        {
            "id": f"short-{slice_name}-{section}-{slug(name.replace(' + ', ' plus '))}",
            "slice": slice_name,
            "cluster": f"short-{slice_name}-{section}-{slug(name.replace(' + ', ' plus '))}",
            "prompt": f"{examples}{ask}{question.format(name)}\n{answer}",
            "answer": right,
        }
        for name, right in facts.items()
        if name in asked
    ]
