"""Calibration and held-out text: read, packed to an exact shape, and never overlapping.

AutoAWQ drops every sample longer than its limit without a word (awq 0.2.9, utils/calib_data.py), so it is given
token sequences of exactly the length it was told, and what really went in is counted here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.settings.schema import QuantizeRecipe


@dataclass(frozen=True)
class Text:
    """One line of a text file: {"id", "text"}."""

    id: str
    text: str


def read_texts(path: str | Path) -> list[Text]:
    """Read a JSONL file of {"id": str, "text": str}; further keys are ignored.

    Raises `UserInputError` with file and line number for anything else, and for an id that occurs twice.
    """
    target = Path(path)
    if not target.is_file():
        raise UserInputError(
            f"{target}: no such file; it must hold one JSON object with id and text per line"
        )
    texts: list[Text] = []
    seen: dict[str, int] = {}
    # Lines end at \n only: str.splitlines would also cut inside a JSON string that holds U+2028.
    for number, line in enumerate(target.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise UserInputError(f"{target}, line {number}: not valid JSON ({error})") from None
        if not isinstance(item, dict):
            raise UserInputError(f"{target}, line {number}: must be a JSON object with id and text")
        for key in ("id", "text"):
            if not isinstance(item.get(key), str) or not item[key].strip():
                raise UserInputError(
                    f"{target}, line {number}: {key}={item.get(key)!r} must be a text that isn't empty"
                )
        if item["id"] in seen:
            raise UserInputError(
                f"{target}, line {number}: id {item['id']!r} was used in line {seen[item['id']]}"
            )
        seen[item["id"]] = number
        texts.append(Text(item["id"], item["text"]))
    if not texts:
        raise UserInputError(f"{target}: holds no texts")
    return texts


def refuse_overlap(calibration_path: str | Path, heldout_path: str | Path) -> None:
    """Raise `UserInputError` when a held-out text is calibration text too: the ratio would flatter itself."""
    calibration = {" ".join(text.text.split()) for text in read_texts(calibration_path)}
    for text in read_texts(heldout_path):
        if " ".join(text.text.split()) in calibration:
            raise UserInputError(
                f"{heldout_path}: text {text.id!r} is in {calibration_path} too; they must not overlap"
            )


def pack_tokens(
    texts: Sequence[Sequence[int]], samples: int, sequence_tokens: int, separator: int | None, seed: int
) -> list[list[int]]:
    """Concatenate token lists in a seeded order and cut at most `samples` pieces of exactly `sequence_tokens`.

    `separator` (the end-of-text token) goes between two texts. Fewer pieces come back when the text runs out;
    the caller compares the count with what it needs.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    stream: list[int] = []
    for index in order:
        if stream and separator is not None:
            stream.append(separator)
        stream.extend(texts[index])
        if len(stream) >= samples * sequence_tokens:
            break
    pieces = min(samples, len(stream) // sequence_tokens)
    return [stream[piece * sequence_tokens : (piece + 1) * sequence_tokens] for piece in range(pieces)]


def refuse_too_little(pieces: Sequence[Sequence[int]], min_effective_tokens: int, path: str | Path) -> int:
    """Return the effective calibration tokens, or raise `UserInputError` when they are under the minimum."""
    effective_tokens = sum(len(piece) for piece in pieces)
    if effective_tokens < min_effective_tokens:
        raise UserInputError(
            f"{path}: gives {effective_tokens} calibration tokens at this sequence_tokens, but "
            f"min_effective_tokens={min_effective_tokens}; add text or lower the recipe's samples and minimum"
        )
    return effective_tokens


def calibration_pieces(
    tokenizer: Any, path: Path, recipe: QuantizeRecipe
) -> tuple[list[list[int]], dict[str, int]]:
    """The token sequences that every backend calibrates on, and the record of what really goes in."""
    texts = read_texts(path)
    pieces = pack_tokens(
        [tokenizer.encode(text.text, add_special_tokens=False) for text in texts],
        recipe.samples,
        recipe.sequence_tokens,
        tokenizer.eos_token_id,
        recipe.seed,
    )
    effective_tokens = refuse_too_little(pieces, recipe.min_effective_tokens, path)
    return pieces, {
        "texts": len(texts),
        "effective_samples": len(pieces),
        "effective_tokens": effective_tokens,
        "sequence_tokens": recipe.sequence_tokens,
    }
