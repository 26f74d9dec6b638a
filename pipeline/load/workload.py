"""What is sent: lengths and prompts, by seed and cell. The same for every variant, so that their cells are paired.

Prompts are random words of the model's vocabulary, or the team's own. No two requests of a cell share a first token, let
alone a KV block, so that prefix caching can't make a variant look faster than it is (vLLM issues 52884, 54227): measured
speed rises up to 2.3 times when prompts repeat. Only the shared-prefix workload is about the cache.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Protocol

from pipeline.errors import UserInputError
from pipeline.files import read_json
from pipeline.load.driver import Request
from pipeline.settings.schema import (
    FixedWorkload,
    LognormalWorkload,
    PromptsWorkload,
    SharedPrefixWorkload,
    WorkloadSettings,
)

PLAIN_WORD = re.compile(
    r"[Ġ▁][a-z]{3,}"
)  # one token that is a lower-case word after a space (byte-level BPE, SentencePiece)
MIN_WORDS = 512


class Vocabulary:
    """The token ids that prompts are drawn from."""

    def __init__(self, model_dir: str | Path) -> None:
        """`UserInputError` when the folder has no usable `tokenizer.json`."""
        self.file = Path(model_dir) / "tokenizer.json"
        content = read_json(self.file)
        try:
            vocabulary = content["model"]["vocab"]
            special = {token["id"] for token in content.get("added_tokens", [])}
        except (TypeError, KeyError):
            raise UserInputError(f"{self.file}: no vocabulary under model.vocab") from None
        if not isinstance(vocabulary, dict):  # Unigram models list (token, score), the position is the id
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        ordinary = {token: number for token, number in vocabulary.items() if number not in special}
        words = [number for token, number in ordinary.items() if PLAIN_WORD.fullmatch(token)]
        self.ids = sorted(words if len(words) >= MIN_WORDS else ordinary.values())

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        """`count` tokens, with repetition."""
        return tuple(rng.choices(self.ids, k=count))

    def distinct(self, rng: random.Random, count: int) -> list[int]:
        """`count` different tokens; `UserInputError` if there aren't so many."""
        if count > len(self.ids):
            raise UserInputError(
                f"{count} requests in one cell need as many different first tokens, {self.file} has {len(self.ids)}"
            )
        return rng.sample(self.ids, count)


class Source(Protocol):
    """A workload made ready: requests by cell."""

    about_prefixes: bool
    """Hits of the prefix cache are what's measured."""

    def requests(self, cell: str, count: int) -> tuple[Request, ...]:
        """`count` requests: a function of model, workload, seed, cell and count alone."""
        ...


def make_source(workload: WorkloadSettings, model_dir: str | Path, seed: int, max_model_len: int) -> Source:
    """The source of a workload; `UserInputError` where its prompts can't be read or are longer than max_model_len."""
    vocabulary = Vocabulary(model_dir)
    if isinstance(workload, FixedWorkload):
        return _Fixed(vocabulary, workload, seed)
    if isinstance(workload, LognormalWorkload):
        return _Lognormal(vocabulary, workload, seed)
    if isinstance(workload, SharedPrefixWorkload):
        return _SharedPrefix(vocabulary, workload, seed)
    return _Prompts(vocabulary, workload, seed, max_model_len)


class _Fixed:
    about_prefixes = False

    def __init__(self, vocabulary: Vocabulary, workload: FixedWorkload, seed: int) -> None:
        self._vocabulary, self._workload, self._seed = vocabulary, workload, seed

    def requests(self, cell: str, count: int) -> tuple[Request, ...]:
        rng = random.Random(f"{self._seed}/{cell}")
        given = self._workload
        return tuple(
            Request((first, *self._vocabulary.draw(rng, given.input_tokens - 1)), given.output_tokens)
            for first in self._vocabulary.distinct(rng, count)
        )


class _Lognormal:
    about_prefixes = False

    def __init__(self, vocabulary: Vocabulary, workload: LognormalWorkload, seed: int) -> None:
        self._vocabulary, self._workload, self._seed = vocabulary, workload, seed

    def requests(self, cell: str, count: int) -> tuple[Request, ...]:
        rng = random.Random(f"{self._seed}/{cell}")
        given, found = self._workload, []
        for first in self._vocabulary.distinct(rng, count):
            inputs = _length(rng, given.input_median_tokens, given.input_sigma, 1, given.input_max_tokens)
            outputs = _length(rng, given.output_median_tokens, given.output_sigma, 2, given.output_max_tokens)
            found.append(Request((first, *self._vocabulary.draw(rng, inputs - 1)), outputs))
        return tuple(found)


def _length(rng: random.Random, median: int, sigma: float, least: int, most: int) -> int:
    return min(max(round(math.exp(rng.gauss(math.log(median), sigma))), least), most)


class _SharedPrefix:
    about_prefixes = True

    def __init__(self, vocabulary: Vocabulary, workload: SharedPrefixWorkload, seed: int) -> None:
        self._vocabulary, self._workload, self._seed = vocabulary, workload, seed
        rng = random.Random(f"{seed}/prefixes")
        firsts = vocabulary.distinct(rng, workload.prefixes)
        self._prefixes = [(first, *vocabulary.draw(rng, workload.prefix_tokens - 1)) for first in firsts]

    def requests(self, cell: str, count: int) -> tuple[Request, ...]:
        rng = random.Random(f"{self._seed}/{cell}")
        given = self._workload
        return tuple(
            Request(
                (
                    *self._prefixes[index % given.prefixes],
                    first,
                    *self._vocabulary.draw(rng, given.input_tokens - 1),
                ),
                given.output_tokens,
            )
            for index, first in enumerate(self._vocabulary.distinct(rng, count))
        )


class _Prompts:
    about_prefixes = False

    def __init__(
        self, vocabulary: Vocabulary, workload: PromptsWorkload, seed: int, max_model_len: int
    ) -> None:
        from tokenizers import Tokenizer

        self._vocabulary, self._seed = vocabulary, seed
        lines = read_prompts(Path(workload.file), workload.output_tokens)
        try:
            tokenizer = Tokenizer.from_file(str(vocabulary.file))
        except Exception as error:  # the library raises nothing narrower
            raise UserInputError(f"{vocabulary.file}: it can't tokenize text ({error})") from None
        self._requests = []
        for where, text, outputs in lines:
            ids = tuple(tokenizer.encode(text).ids)
            if len(ids) + 1 + outputs > max_model_len:
                raise UserInputError(
                    f"{where}: {len(ids)} prompt tokens, 1 drawn and {outputs} generated ones are more than max_model_len "
                    f"{max_model_len}"
                )
            self._requests.append(Request(ids, outputs))

    def requests(self, cell: str, count: int) -> tuple[Request, ...]:
        firsts = self._vocabulary.distinct(random.Random(f"{self._seed}/{cell}"), count)
        own = [self._requests[index % len(self._requests)] for index in range(count)]
        return tuple(
            Request((first, *request.prompt), request.output_tokens)
            for first, request in zip(firsts, own, strict=True)
        )


def read_prompts(path: Path, output_tokens: int) -> list[tuple[str, str, int]]:
    """(where, prompt, tokens to generate) of each line; `UserInputError` names the file and the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserInputError(f"load.workload.file {path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: not UTF-8 text ({error.reason})") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserInputError(f"{where}: not valid JSON ({error.msg})") from None
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise UserInputError(f'{where}: no text under the key "prompt"')
        outputs = row.get("output_tokens", output_tokens)
        if not isinstance(outputs, int) or outputs < 2:
            raise UserInputError(
                f"{where}: output_tokens is {outputs!r}, a whole number of at least 2 is needed"
            )
        found.append((where, text, outputs))
    if not found:
        raise UserInputError(f"{path}: it holds no prompt")
    return found
