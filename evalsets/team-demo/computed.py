"""Arithmetic whose answers are computed: sums, differences, products and sequences, two solved examples before each."""

from __future__ import annotations

from items import Question, distractors, ranked

ADDITIONS = 34
SUBTRACTIONS = 28
PRODUCTS = 28
SEQUENCES = [
    (2, 2), (5, 5), (10, 10), (1, 2), (3, 3), (4, 4), (100, 100), (20, 5), (7, 7), (50, 50), (6, 6), (9, 9),
    (11, 11), (30, -3), (60, -10), (12, -2), (25, 25), (1, 10), (15, 15), (90, -10),
]  # fmt: skip


def arithmetic_questions() -> list[Question]:
    """All computed questions of the slice `arithmetic`."""
    sums = _table("addition", "+", [(a, b) for a in range(3, 40) for b in range(2, 20) if a > b], ADDITIONS)
    gaps = _table(
        "subtraction", "-", [(a, b) for a in range(8, 50) for b in range(2, 20) if a - b > 2], SUBTRACTIONS
    )
    products = _table(
        "product", "*", [(a, b) for a in range(3, 13) for b in range(2, 11) if a >= b], PRODUCTS
    )
    return [*sums, *gaps, *products, *_sequences()]


def _table(section: str, sign: str, pairs: list[tuple[int, int]], count: int) -> list[Question]:
    """`count` of the pairs. Examples come from the pairs that are never asked, so no prompt holds another's answer."""
    texts = ranked(section, (f"{a} {sign} {b}" for a, b in pairs))
    asked, examples = texts[:count], texts[count:]
    questions = []
    for text in asked:
        shown = [example for example in ranked(text, examples)[:3] if _value(example) != _value(text)][:2]
        prompt = "".join(f"{example} = {_value(example)}\n" for example in shown) + f"{text} ="
        wrong = _near(text, _value(text), sign)
        # The operands name it: "12 + 7" and "12 - 7" must not have one id.
        subject = text.replace(" + ", " plus ").replace(" - ", " minus ").replace(" * ", " times ")
        questions.append(Question("arithmetic", section, subject, prompt, str(_value(text)), wrong, subject))
    return questions


def _value(text: str) -> int:
    left, sign, right = text.split(" ")
    a, b = int(left), int(right)
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def _near(key: str, value: int, sign: str) -> tuple[str, ...]:
    """Wrong answers of the kind that people give: one off, a ten off, the neighbouring product."""
    step = int(key.partition(" ")[0]) if sign == "*" else 3
    near = {
        value - 1,
        value + 1,
        value + 2,
        value - 2,
        value + 10,
        value - 10,
        value + step,
        value - step,
    } - {value}
    return distractors(key, str(value), (str(number) for number in near if number > 0))


def _sequences() -> list[Question]:
    questions = []
    for start, step in SEQUENCES:
        shown = [start + step * place for place in range(4)]
        right = start + step * 4
        near = {right + 1, right - 1, right + 2 * step, shown[-1], right + 3, right - 2} - {right}
        text = ", ".join(str(number) for number in shown)
        subject = f"from {start} by {step}".replace("by -", "down ")
        wrong = distractors(text, str(right), (str(number) for number in near if number > 0))
        prompt = f"Continue the sequence: {text},"
        questions.append(Question("arithmetic", "sequence", subject, prompt, str(right), wrong, subject))
    return questions
