"""Writes items.jsonl: the same bytes from the same facts, every time.

    python evalsets/team-demo/build.py [FILE]

Standard library only. Without FILE it writes items.jsonl beside itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    # Before the modules beside this one are imported: an eval set's folder holds the eval set and no byte code.
    sys.dont_write_bytecode = True
    from computed import arithmetic_questions
    from fact_tables import expression_questions, questions_of
    from items import Question, as_items
    from passages import passage_questions

    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("items.jsonl")
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
    items = as_items(questions)
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    temporary = target.with_name(f".{target.name}.partial")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(target)
    counts = Counter(str(item["slice"]) for item in items)
    print(f"{target}: {len(items)} items, " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
