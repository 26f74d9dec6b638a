"""Writes items.jsonl and short.jsonl: the same bytes from the same facts, every time.

    python evalsets/team-demo/build.py [FOLDER]

Standard library only. Without FOLDER it writes them beside itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def main() -> None:
    # Before the modules beside this one are imported: an eval set's folder holds the eval set and no byte code.
    sys.dont_write_bytecode = True
    from computed import arithmetic_questions
    from fact_tables import expression_questions, questions_of
    from items import Question, as_items
    from passages import passage_questions
    from short_answers import short_items

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    questions: list[Question] = [
        *questions_of("knowledge"),
        *questions_of("language"),
        *questions_of("arithmetic"),
        *arithmetic_questions(),
        *questions_of("code"),
        *expression_questions(),
        *questions_of("chinese"),
        *passage_questions(),
    ]
    _write(folder / "items.jsonl", as_items(questions))
    _write(folder / "short.jsonl", short_items())


def _write(target: Path, items: Sequence[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    temporary = target.with_name(f".{target.name}.partial")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(target)
    counts = Counter(str(item["slice"]) for item in items)
    print(f"{target}: {len(items)} items, " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
