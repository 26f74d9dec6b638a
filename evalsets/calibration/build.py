"""Writes calibration.jsonl and heldout.jsonl from texts/, and the same as chats: the same bytes from the same texts, every time.

    python evalsets/calibration/build.py [FOLDER]

Each text in texts/*.txt starts with a line `== name`. heldout.txt becomes heldout.jsonl, all others calibration.jsonl,
where the kinds take turns: whoever takes only the first texts still gets prose, code, mathematics and Chinese.

chats.jsonl and heldout-chats.jsonl hold the same texts in the form of a server's requests. A dialogue is a chat as it is. Of every
other text the user gives the beginning and the assistant goes on; so many of these exchanges make one chat that it is about as
long as a context of 8,192 tokens, for scales of keys and values that are to hold at any position there.
Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
HELDOUT = "heldout"
LONG_CHARACTERS = 25_000
"""Of a long chat: 7 to 8 thousand tokens by SmolLM2's tokenizer, template included."""
ROLES = {"User": "user", "Assistant": "assistant"}
Chat = dict[str, object]


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


def turns_of(text: str) -> list[dict[str, str]] | None:
    """The messages of a text whose lines begin with who speaks; None for any other text."""
    messages: list[dict[str, str]] = []
    for line in text.splitlines():
        speaker, found, said = line.partition(": ")
        if found and speaker in ROLES:
            messages.append({"role": ROLES[speaker], "content": said})
        elif messages:
            messages[-1]["content"] += f"\n{line}"
        else:
            return None
    return messages


def exchange_of(text: str) -> list[dict[str, str]]:
    """The beginning of a text, up to the end of a sentence or line after a third of it, and the rest as the answer."""
    third = len(text) // 3
    ends = [at + 1 for at in range(third, len(text) - 1) if text[at] in "\n。" or text[at : at + 2] == ". "]
    cut = ends[0] if ends else third
    ask = "请接着写：" if any("\u4e00" <= letter <= "\u9fff" for letter in text) else "Go on with this:"
    return [
        {"role": "user", "content": f"{ask}\n\n{text[:cut].rstrip()}"},
        {"role": "assistant", "content": text[cut:].lstrip()},
    ]


def chats_of(records: list[dict[str, str]]) -> list[Chat]:
    """The texts as chats: dialogues first, then the long ones."""
    dialogues: list[Chat] = []
    long: list[list[dict[str, str]]] = [[]]
    size = 0
    for record in records:
        turns = turns_of(record["text"])
        if turns is not None:
            dialogues.append({"id": record["id"], "messages": turns})
            continue
        if size + len(record["text"]) > LONG_CHARACTERS and long[-1]:
            long.append([])
            size = 0
        long[-1] += exchange_of(record["text"])
        size += len(record["text"])
    return [*dialogues, *({"id": f"long-{number}", "messages": chat} for number, chat in enumerate(long, 1))]


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    files = sorted((HERE / "texts").glob("*.txt"))
    kinds = [texts_of(path) for path in files if path.stem != HELDOUT]
    calibration, heldout = interleaved(kinds), texts_of(HERE / "texts" / f"{HELDOUT}.txt")
    _write(target / "calibration.jsonl", calibration)
    _write(target / "heldout.jsonl", heldout)
    _write(target / "chats.jsonl", chats_of(calibration))
    _write(target / "heldout-chats.jsonl", chats_of(heldout))


def _write(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)
    print(f"{path}: {len(records)} texts, {len(text)} characters")


if __name__ == "__main__":
    main()
