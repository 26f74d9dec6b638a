"""Questions from the tables in facts/: one fact a line, one prompt template a section (the format is in README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from items import Question, distractors

FACTS = Path(__file__).parent / "facts"
# Results of expressions are computed here, from our own table and with nothing but these names.
BUILTINS = {
    function.__name__: function
    for function in (abs, int, len, list, max, min, range, reversed, round, sorted, str, sum)
}


@dataclass
class Section:
    """A template, its facts, and the template that asks for the subject instead of the answer."""

    name: str
    template: str = ""
    backward: str | None = None
    rows: list[tuple[str, str, str]] = field(default_factory=list)


def read_sections(name: str) -> list[Section]:
    """The sections of facts/NAME.txt."""
    sections: list[Section] = []
    for raw in (FACTS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if not line or line.startswith("# "):
            continue
        if line.startswith("[") and line.endswith("]") and "|" not in line:
            sections.append(Section(line[1:-1]))
        elif line.startswith("> "):
            sections[-1].template = _text(line[2:])
        elif line.startswith("< "):
            sections[-1].backward = _text(line[2:])
        else:
            cells = [_text(cell.strip()) for cell in line.split(" | ")]
            sections[-1].rows.append((cells[0], cells[1], cells[2] if len(cells) > 2 else ""))
    return sections


def questions_of(slice_name: str) -> list[Question]:
    """The questions of facts/SLICE.txt."""
    return [
        question
        for section in read_sections(slice_name)
        for question in _section_questions(slice_name, section)
    ]


def expression_questions() -> list[Question]:
    """What Python expressions give; the right answer is evaluated, and a distractor that equals it is refused."""
    questions = []
    for section in read_sections("expressions"):
        for expression, wrong, _ in section.rows:
            value = eval(expression, {"__builtins__": BUILTINS})  # our own constants, see BUILTINS
            right = repr(value) if isinstance(value, bool) else json.dumps(value)
            prompt = section.template.replace("{}", expression)
            questions.append(
                Question("code", section.name, expression, prompt, right, _listed(wrong), expression)
            )
    return questions


def _section_questions(slice_name: str, section: Section) -> list[Question]:
    questions = []
    for subject, answer, third in section.rows:
        key = f"{slice_name}/{section.name}/{subject}"
        if " / " in third:
            wrong = _listed(third)
        else:
            pool = {row[1] for row in section.rows if row[2] == third} - {answer}
            wrong = distractors(key, answer, pool)
        prompt = section.template.replace("{0}", subject).replace("{}", subject)
        questions.append(Question(slice_name, section.name, subject, prompt, answer, wrong, subject))
        if section.backward:
            others = {row[0] for row in section.rows if row[2] == third} - {subject}
            wrong = distractors(f"{key}/backward", subject, others)
            prompt = section.backward.replace("{}", answer)
            questions.append(
                Question(slice_name, section.name, f"{subject} back", prompt, subject, wrong, subject)
            )
    return questions


def _listed(cell: str) -> tuple[str, ...]:
    return tuple(cell.split(" / "))


def _text(cell: str) -> str:
    return cell.replace("\\n", "\n")
