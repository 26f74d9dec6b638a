"""Calibration and held-out text: turned into tokens as the model will see them, packed without loss, counted.

AutoAWQ drops every sample longer than its limit without a word (awq 0.2.9, utils/calib_data.py), and llm-compressor cuts
and pads; so both backends are given sequences of exactly the length that they are told, and what went in is recorded here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserInputError
from pipeline.files import sha256_file
from pipeline.texts import Text, TextIndex, is_telling, load_texts, read_texts, words_of

if TYPE_CHECKING:
    from pipeline.quantize.base import QuantizeRequest

WINDOW_TOKENS = 256
"""Tokens of a window of held-out text."""
MAX_HELDOUT_TOKENS = 4096  # 16 windows: about 8 s per model for 135M parameters on 2 cores
MIN_HELDOUT_TOKENS = 512
HELDOUT_SEED = 0  # not the recipe's: the ratios of two recipes must be about the same windows


def calibration_pieces(request: QuantizeRequest, tokenizer: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """The weights' token sequences of exactly `recipe.sequence_tokens`, and the record of what they are made of.

    Raises `UserInputError` when they hold fewer tokens than the recipe's minimum.
    """
    return _pieces(
        request, tokenizer, request.recipe.samples, request.recipe.sequence_tokens, "sequence_tokens"
    )


def kv_pieces(request: QuantizeRequest, tokenizer: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """The same for the scales of keys and values: sequences as long as those of the deployment."""
    samples, sequence_tokens = request.recipe.kv_text
    key = "sequence_tokens" if request.recipe.kv_sequence_tokens is None else "kv_sequence_tokens"
    return _pieces(request, tokenizer, samples, sequence_tokens, key)


def _pieces(
    request: QuantizeRequest, tokenizer: Any, samples: int, sequence_tokens: int, key: str
) -> tuple[list[list[int]], dict[str, Any]]:
    recipe, path = request.recipe, request.calibration_file
    texts = read_texts(path)
    tokens = encode(texts, tokenizer, path, request.chat_template)
    pieces = pack_tokens(tokens, samples, sequence_tokens, tokenizer.eos_token_id, recipe.seed)
    available = sum(map(len, tokens))
    effective = sum(map(len, pieces))
    if effective < recipe.min_effective_tokens:
        raise UserInputError(
            f"{path}: holds {available} tokens, of which {effective} fill sequences of {key}={sequence_tokens}; "
            f"min_effective_tokens={recipe.min_effective_tokens} are needed, so add text"
        )
    return pieces, {
        "file": str(path),
        "sha256": sha256_file(path),
        "texts": len(texts),
        "chats": sum(1 for text in texts if text.messages),
        "chat_template": request.chat_template,
        "available_tokens": available,
        "effective_samples": len(pieces),
        "effective_tokens": effective,
        "sequence_tokens": sequence_tokens,
    }


def heldout_pieces(request: QuantizeRequest, tokenizer: Any) -> list[list[int]]:
    """Windows of held-out text, each of exactly `WINDOW_TOKENS` tokens. `UserInputError` when they hold too few."""
    path = request.heldout_file
    tokens = encode(read_texts(path), tokenizer, path, request.chat_template)
    windows = MAX_HELDOUT_TOKENS // WINDOW_TOKENS
    pieces = pack_tokens(tokens, windows, WINDOW_TOKENS, tokenizer.eos_token_id, HELDOUT_SEED)
    if sum(map(len, pieces)) < MIN_HELDOUT_TOKENS:
        raise UserInputError(
            f"{path}: gives {sum(map(len, pieces))} tokens in windows of {WINDOW_TOKENS}; "
            f"at least {MIN_HELDOUT_TOKENS} are needed to compare perplexities"
        )
    return pieces


def coverage_pieces(request: QuantizeRequest, tokenizer: Any) -> list[list[int]]:
    """Held-out text in sequences as long as those that the KV scales were calibrated on, as far as it reaches.

    Keys turn with their position, so scales are held against what occurs where the deployment's tokens are.
    """
    path = request.heldout_file
    tokens = encode(read_texts(path), tokenizer, path, request.chat_template)
    length = max(WINDOW_TOKENS, request.recipe.kv_text[1])
    length = min(length, sum(map(len, tokens)) + len(tokens) - 1)  # with a separator between two
    windows = max(1, MAX_HELDOUT_TOKENS // length)
    return pack_tokens(tokens, windows, length, tokenizer.eos_token_id, HELDOUT_SEED)


def encode(texts: Sequence[Text], tokenizer: Any, path: str | Path, chat_template: bool) -> list[list[int]]:
    """Tokens of each text. With `chat_template` they are what a server that applies the model's template would see: a chat
    as it is, a plain text as a user's turn that waits for its answer.

    Raises `UserInputError` for chats without a template to put them in.
    """
    if not chat_template:
        refuse_chats(texts, path)
        return [tokenizer.encode(text.text, add_special_tokens=False) for text in texts]
    if not getattr(tokenizer, "chat_template", None):
        raise UserInputError(
            f"{path}: chat_template is true in conf/calibration, but the model's tokenizer has none"
        )
    return [tokenizer.encode(_templated(text, tokenizer, path), add_special_tokens=False) for text in texts]


def refuse_chats(texts: Sequence[Text], path: str | Path) -> None:
    """Raise `UserInputError` for a chat among texts that no template is put around."""
    chat = next((text for text in texts if text.messages), None)
    if chat is not None:
        raise UserInputError(
            f"{path}: {chat.id!r} is a chat (messages), which only the model's chat template turns into text; "
            "set chat_template: true in conf/calibration, or give it as text"
        )


def _templated(text: Text, tokenizer: Any, path: str | Path) -> str:
    turns = text.messages or (("user", text.text),)
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        # A prompt that the model hasn't answered yet ends where its answer begins, as in the server.
        rendered: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=turns[-1][0] != "assistant"
        )
    except Exception as error:  # the template is a program of the model's; jinja raises what it likes
        raise UserInputError(f"{path}: {text.id!r}: the model's chat template refuses it ({error})") from None
    return rendered


def refuse_overlap(calibration_path: str | Path, heldout_path: str | Path) -> None:
    """Raise `UserInputError` when a held-out text is calibration text too, whole or half: the ratio would flatter itself."""
    calibration = load_texts(calibration_path)
    index = TextIndex(calibration)
    whole = {" ".join(words_of(text)): name for name, text in calibration.items()}
    for name, text in load_texts(heldout_path).items():
        tokens = words_of(text)
        found = index.find(tokens) if is_telling(tokens) else None
        same = whole.get(" ".join(tokens))
        if found is not None or same is not None:
            how = found.how() if found else "word for word"
            raise UserInputError(
                f"{heldout_path}: text {name!r} is in {calibration_path} too, in {same or (found and found.text_id)!r} ({how}); "
                "they must not overlap"
            )


def pack_tokens(
    texts: Sequence[Sequence[int]], samples: int, sequence_tokens: int, separator: int | None, seed: int
) -> list[list[int]]:
    """Concatenate token lists in a seeded order and cut at most `samples` pieces of exactly `sequence_tokens`.

    `separator` (the end-of-text token) goes between two texts. When the text runs out within a piece, that piece reaches
    back for what it lacks, so that nothing is dropped; text shorter than one piece gives none.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    stream: list[int] = []
    wanted = samples * sequence_tokens
    for index in order:
        if stream and separator is not None:
            stream.append(separator)
        stream.extend(texts[index])
        if len(stream) >= wanted:
            break
    ends = range(sequence_tokens, min(len(stream), wanted) + 1, sequence_tokens)
    pieces = [stream[end - sequence_tokens : end] for end in ends]
    if pieces and len(pieces) < samples and len(stream) % sequence_tokens:
        pieces.append(stream[-sequence_tokens:])
    return pieces
