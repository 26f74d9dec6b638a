"""Long prompts: a passage of filler with five or six facts in it, and questions that only the passage answers.

Names, things and numbers are combined by hash, so nothing of it can be known from anywhere else. Three questions share a
passage and hence a cluster.
"""

from __future__ import annotations

from collections.abc import Callable

from fact_tables import FACTS
from items import Question, ranked

PASSAGES_OF_A_KIND = 10
QUESTIONS_OF_A_PASSAGE = 3
# With this much filler the longest prompt and choice have 433 tokens of SmolLM2-135M's tokenizer (measured); 480 is the limit.
FILLER_WORDS = (190, 220, 245, 270, 290)

NAMES = [
    "Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Grace", "Henry", "Irene", "Jonas",
    "Karin", "Louis", "Maria", "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tessa",
    "Ulrich", "Vera", "Walter", "Yara",
]  # fmt: skip
THINGS = [
    "brass key", "red scarf", "silver coin", "old map", "blue notebook", "glass bowl", "wooden flute", "leather bag",
    "gold ring", "pocket knife", "green candle", "music box", "straw hat", "silk ribbon", "copper kettle", "chess set",
    "letter opener", "wool blanket", "tin whistle", "photo album",
]  # fmt: skip
PLACES = [
    "attic", "kitchen drawer", "garden shed", "piano bench", "laundry basket", "bottom shelf", "writing desk", "coal bucket",
    "guest room", "pantry", "hall cupboard", "toy chest", "workshop", "sewing table", "bread bin", "umbrella stand",
    "greenhouse", "boat house",
]  # fmt: skip
JOBS = [
    "painter", "nurse", "gardener", "baker", "lawyer", "sailor", "singer", "farmer", "tailor", "teacher", "writer", "cook",
    "driver", "doctor", "waiter", "hunter",
]  # fmt: skip
DOORS = ["north", "south", "east", "west", "upper", "lower", "inner", "outer", "front", "back"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
DISHES = [
    "pea soup", "fried fish", "apple pie", "roast chicken", "bean stew", "potato salad", "mushroom rice", "lamb chops",
    "onion tart", "egg noodles", "carrot cake", "beef dumplings",
]  # fmt: skip

Fact = tuple[str, str, str]  # a sentence of the passage, the prompt's last line, the right answer


def passage_questions() -> list[Question]:
    """The questions of the slice `long_context`."""
    filler = [
        line
        for line in (FACTS / "filler.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    kinds: dict[str, Callable[[str], list[Fact]]] = {
        "places": _places,
        "moved": _moved,
        "codes": _codes,
        "jobs": _jobs,
        "dishes": _dishes,
    }
    return [
        question
        for kind, facts_of in kinds.items()
        for number in range(PASSAGES_OF_A_KIND)
        for question in _questions(
            kind, f"{kind} {number + 1}", FILLER_WORDS[number % len(FILLER_WORDS)], facts_of, filler
        )
    ]


def _questions(
    kind: str, name: str, filler_words: int, facts_of: Callable[[str], list[Fact]], filler: list[str]
) -> list[Question]:
    facts = facts_of(name)
    passage = _woven(name, filler, filler_words, [sentence for sentence, _, _ in facts])
    asked = ranked(f"{name} asked", [last_line for _, last_line, _ in facts])[:QUESTIONS_OF_A_PASSAGE]
    questions = []
    for sentence, last_line, right in facts:
        if last_line not in asked:
            continue
        # What else the passage offers, the place that a thing has left included.
        others = ranked(last_line, (answer for _, _, answer in facts if answer != right))
        wrong = [_left_place(sentence), *others] if kind == "moved" else others
        prompt = f"{passage}\n\n{last_line}"
        source = name.removeprefix(f"{kind} ")
        questions.append(
            Question("long_context", kind, f"{source} {right}", prompt, right, tuple(wrong[:3]), source)
        )
    return questions


def _woven(name: str, filler: list[str], filler_words: int, facts: list[str]) -> str:
    """Filler up to a number of words with the facts spread over it; each fact's place depends on the passage's name."""
    chosen: list[str] = []
    for sentence in ranked(f"{name} filler", filler):
        if sum(len(line.split()) for line in chosen) + len(sentence.split()) > filler_words:
            break
        chosen.append(sentence)
    slots = sorted(
        int(slot)
        for slot in ranked(f"{name} slots", (str(slot) for slot in range(len(chosen))))[: len(facts)]
    )
    for slot, fact in reversed(list(zip(slots, facts, strict=True))):
        chosen.insert(slot, fact)
    return " ".join(chosen)


def _places(name: str) -> list[Fact]:
    forms = ["{who} keeps the {what} in the {where}.", "The {what} of {who} lies in the {where}."]
    return [
        (
            forms[place % 2].format(who=who, what=what, where=where),
            f"According to the text, {who} has put the {what} in the",
            where,
        )
        for place, (who, what, where) in enumerate(
            zip(ranked(name, NAMES)[:6], ranked(name, THINGS), ranked(name, PLACES), strict=False)
        )
    ]


def _moved(name: str) -> list[Fact]:
    places = ranked(name, PLACES)
    return [
        (
            f"{who} took the {what} out of the {places[2 * place]} and hid it in the {places[2 * place + 1]}.",
            f"According to the text, the {what} is now in the",
            places[2 * place + 1],
        )
        for place, (who, what) in enumerate(zip(ranked(name, NAMES)[:5], ranked(name, THINGS), strict=False))
    ]


def _left_place(sentence: str) -> str:
    return sentence.partition(" out of the ")[2].partition(" and hid")[0]


def _codes(name: str) -> list[Fact]:
    codes = ranked(name, (str(number) for number in range(1013, 9990, 37)))
    return [
        (
            f"The code of the {door} door is {code}.",
            f"According to the text, the code of the {door} door is",
            code,
        )
        for door, code in zip(ranked(name, DOORS)[:5], codes, strict=False)
    ]


def _jobs(name: str) -> list[Fact]:
    forms = [
        "{who} works as a {job}.",
        "Everyone knows {who}, the {job}.",
        "{who} has been a {job} for years.",
    ]
    return [
        (forms[place % 3].format(who=who, job=job), f"According to the text, the profession of {who} is", job)
        for place, (who, job) in enumerate(zip(ranked(name, NAMES)[:6], ranked(name, JOBS), strict=False))
    ]


def _dishes(name: str) -> list[Fact]:
    dishes = ranked(name, DISHES)
    return [
        (f"On {day} the inn serves {dish}.", f"According to the text, on {day} the inn serves", dish)
        for day, dish in zip(ranked(name, DAYS)[:5], dishes, strict=False)
    ]
