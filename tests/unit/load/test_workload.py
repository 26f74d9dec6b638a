"""Prompts: exact in length, distinct, and the same for every variant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.load.workload import PromptPool, Workload

WORKLOAD = Workload(
    levels=(4, 16),
    input_tokens=48,
    output_tokens=8,
    requests_per_stream=1.5,
    min_requests=8,
    warmup_requests=1,
    seed=7,
)


def folder(path: Path, vocabulary: Any, special: tuple[int, ...] = ()) -> Path:
    path.mkdir(exist_ok=True)
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in special]
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    return path


def words(count: int, mark: str = "Ġ") -> dict[str, int]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return {
        mark + letters[i // 676 % 26] + letters[i // 26 % 26] + letters[i % 26]: i + 10 for i in range(count)
    }


@pytest.fixture
def pool(tmp_path: Path) -> PromptPool:
    return PromptPool(folder(tmp_path, {"!": 0, "<s>": 1, "Ġ42": 2, **words(600)}, special=(1,)))


def test_prompts_are_exact_distinct_and_plain(pool: PromptPool) -> None:
    prompts = pool.prompts(WORKLOAD, 16, 24)
    assert [len(prompt) for prompt in prompts] == [48] * 24
    assert len({prompt[0] for prompt in prompts}) == 24
    assert all(10 <= token < 610 for prompt in prompts for token in prompt)


def test_two_variants_get_the_same_prompts(tmp_path: Path, pool: PromptPool) -> None:
    copy = folder(tmp_path / "quantized", {**words(600), "Ġ42": 2, "!": 0, "<s>": 1}, special=(1,))
    assert PromptPool(copy).prompts(WORKLOAD, 16, 24) == pool.prompts(WORKLOAD, 16, 24)


def test_levels_and_seeds_get_other_prompts(pool: PromptPool) -> None:
    base = pool.prompts(WORKLOAD, 16, 24)
    assert not set(base) & set(pool.prompts(WORKLOAD, 4, 24))
    assert not set(base) & set(pool.prompts(replace(WORKLOAD, seed=8), 16, 24))


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    vocabulary = [[token, -1.0] for token in ("<unk>", *words(600, "▁"))]
    prompts = PromptPool(folder(tmp_path, vocabulary, special=(0,))).prompts(WORKLOAD, 4, 8)
    assert all(1 <= token <= 600 for prompt in prompts for token in prompt)


def test_vocabulary_without_words_serves_with_whatever_is_not_special(tmp_path: Path) -> None:
    vocabulary = {chr(0x4E00 + number): number for number in range(256)}
    prompts = PromptPool(folder(tmp_path, vocabulary, special=(0, 255))).prompts(WORKLOAD, 4, 200)
    assert {0, 255}.isdisjoint(token for prompt in prompts for token in prompt)
    assert len({prompt[0] for prompt in prompts}) == 200


def test_vocabulary_smaller_than_the_level(tmp_path: Path) -> None:
    pool = PromptPool(folder(tmp_path, {chr(0x4E00 + number): number for number in range(20)}))
    with pytest.raises(UserInputError, match=r"24 requests .*tokenizer\.json has 20"):
        pool.prompts(WORKLOAD, 16, 24)


def test_missing_or_foreign_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"tokenizer\.json: no such file"):
        PromptPool(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(UserInputError, match=r"tokenizer\.json: no vocabulary"):
        PromptPool(tmp_path)


def test_requests_of_a_level() -> None:
    assert WORKLOAD.requests_at(4) == 8  # the minimum
    assert WORKLOAD.requests_at(16) == 24
    assert replace(WORKLOAD, requests_per_stream=1.1).requests_at(10) == 11  # 1.1 * 10 is 11.000000000000002
    assert (
        replace(WORKLOAD, requests_per_stream=0.25).requests_at(16) == 16
    )  # fewer would never reach 16 at once


@pytest.mark.parametrize(
    "change",
    [{"levels": ()}, {"levels": (4, 4)}, {"levels": (0,)}, {"input_tokens": 0}, {"output_tokens": 1}],
)
def test_impossible_workloads_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match="load"):
        replace(WORKLOAD, **change)
