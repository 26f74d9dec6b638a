"""Writes calibration.jsonl and heldout.jsonl from texts/: the same bytes from the same texts, every time.

    python evalsets/calibration/build.py [FOLDER]

Each text in texts/*.txt starts with a line `== name`. heldout.txt becomes heldout.jsonl, all others calibration.jsonl,
where the kinds take turns: whoever takes only the first texts still gets prose, code, mathematics and Chinese.
Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
HELDOUT = "heldout"


def texts_of(path: Path) -> list[dict[str, str]]:
    """The texts of one file as {"id": FILE-NAME, "text"}."""
    records = []
    for block in f"\n{path.read_text(encoding='utf-8')}".split("\n== ")[1:]:
        name, _, text = block.partition("\n")
        records.append({"id": f"{path.stem}-{name.strip()}", "text": text.strip()})
    return records


def interleaved(kinds: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """All texts, every kind spread evenly over the whole."""
    placed = [
        ((place + 0.5) / len(kind), number, text)
        for number, kind in enumerate(kinds)
        for place, text in enumerate(kind)
    ]
    return [text for _, _, text in sorted(placed, key=lambda entry: entry[:2])]


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    files = sorted((HERE / "texts").glob("*.txt"))
    kinds = [texts_of(path) for path in files if path.stem != HELDOUT]
    _write(target / "calibration.jsonl", interleaved(kinds))
    _write(target / "heldout.jsonl", texts_of(HERE / "texts" / f"{HELDOUT}.txt"))


def _write(path: Path, records: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)
    print(f"{path}: {len(records)} texts, {sum(len(record['text']) for record in records)} characters")


if __name__ == "__main__":
    main()
