"""Prompts: exact, distinct, the same for every variant, other in every cell; and every way a prompts file can be wrong."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.load.workload import make_source
from pipeline.settings.schema import FixedWorkload, LognormalWorkload, PromptsWorkload, SharedPrefixWorkload

FIXED = FixedWorkload(kind="fixed", input_tokens=48, output_tokens=16)


def folder(path: Path, vocabulary: Any, special: tuple[int, ...] = ()) -> Path:
    """A model folder with nothing but a tokenizer."""
    path.mkdir(exist_ok=True)
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": number} for number in special]}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def words(count: int, mark: str = "Ġ") -> dict[str, int]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return {
        mark + letters[i // 676 % 26] + letters[i // 26 % 26] + letters[i % 26]: i + 10 for i in range(count)
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "model", {"!": 0, "<s>": 1, "Ġ42": 2, **words(600)}, special=(1,))


def fixed(model: Path, seed: int = 7) -> Any:
    return make_source(FIXED, model, seed, 512)


def test_prompts_are_exact_distinct_and_plain(model: Path) -> None:
    requests = fixed(model).requests("level-16", 24)
    assert [(len(request.prompt), request.output_tokens) for request in requests] == [(48, 16)] * 24
    assert len({request.prompt[0] for request in requests}) == 24
    assert all(10 <= token < 610 for request in requests for token in request.prompt)


def test_two_variants_get_the_same_prompts(tmp_path: Path, model: Path) -> None:
    copy = folder(tmp_path / "quantized", {**words(600), "Ġ42": 2, "!": 0, "<s>": 1}, special=(1,))
    assert fixed(copy).requests("level-16", 24) == fixed(model).requests("level-16", 24)


def test_cells_and_seeds_get_other_prompts(model: Path) -> None:
    base = {request.prompt for request in fixed(model).requests("level-16", 24)}
    assert not base & {request.prompt for request in fixed(model).requests("level-16-repeat-2", 24)}
    assert not base & {request.prompt for request in fixed(model, seed=8).requests("level-16", 24)}


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    vocabulary = [[token, -1.0] for token in ("<unk>", *words(600, "▁"))]
    requests = fixed(folder(tmp_path / "m", vocabulary, special=(0,))).requests("level-4", 8)
    assert all(1 <= token <= 600 for request in requests for token in request.prompt)


def test_vocabulary_without_words_serves_with_whatever_is_not_special(tmp_path: Path) -> None:
    vocabulary = {chr(0x4E00 + number): number for number in range(256)}
    requests = fixed(folder(tmp_path / "m", vocabulary, special=(0, 255))).requests("level-4", 200)
    assert {0, 255}.isdisjoint(token for request in requests for token in request.prompt)
    assert len({request.prompt[0] for request in requests}) == 200


def test_vocabulary_smaller_than_the_cell(tmp_path: Path) -> None:
    source = fixed(folder(tmp_path / "m", {chr(0x4E00 + number): number for number in range(20)}))
    with pytest.raises(UserInputError, match=r"24 requests .*tokenizer\.json has 20"):
        source.requests("level-16", 24)


def test_missing_or_foreign_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"tokenizer\.json: no such file"):
        fixed(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(UserInputError, match=r"tokenizer\.json: no vocabulary"):
        fixed(tmp_path)


def test_lengths_follow_the_distribution_within_its_limits(model: Path) -> None:
    workload = LognormalWorkload(
        kind="lognormal",
        input_median_tokens=100,
        input_sigma=1.0,
        input_max_tokens=400,
        output_median_tokens=20,
        output_sigma=0.5,
        output_max_tokens=60,
    )
    requests = make_source(workload, model, 7, 512).requests("level-16", 600)
    inputs, outputs = [len(r.prompt) for r in requests], [r.output_tokens for r in requests]
    assert 80 <= statistics.median(inputs) <= 125 and max(inputs) == 400
    assert 18 <= statistics.median(outputs) <= 22 and max(outputs) <= 60 and min(outputs) >= 2
    assert len({r.prompt[0] for r in requests}) == 600


def test_shared_prefixes_are_shared_across_cells_and_the_rest_is_not(model: Path) -> None:
    workload = SharedPrefixWorkload(
        kind="shared-prefix", prefixes=2, prefix_tokens=32, input_tokens=8, output_tokens=4
    )
    source = make_source(workload, model, 7, 512)
    assert source.about_prefixes
    one, other = source.requests("level-4", 8), source.requests("level-8", 8)
    assert len({request.prompt[:32] for request in (*one, *other)}) == 2
    assert len({request.prompt[32:] for request in (*one, *other)}) == 16
    assert {len(request.prompt) for request in one} == {40}


@pytest.fixture
def real_model(tmp_path: Path) -> Path:
    """A tokenizer that the tokenizers library can load: one token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(
        WordLevel({"[UNK]": 0, **{f"w{number}": number for number in range(1, 600)}}, "[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path / "real"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def prompts(path: Path, *lines: str) -> PromptsWorkload:
    (path / "team.jsonl").write_text("\n".join(lines) + "\n")
    return PromptsWorkload(kind="prompts", file=str(path / "team.jsonl"), output_tokens=8)


def test_the_teams_prompts_are_sent_in_order_each_behind_a_token_of_its_own(
    tmp_path: Path, real_model: Path
) -> None:
    workload = prompts(tmp_path, '{"prompt": "w1 w2 w3"}', "", '{"prompt": "w4", "output_tokens": 5}')
    requests = make_source(workload, real_model, 7, 512).requests("level-4", 5)
    assert [request.prompt[1:] for request in requests] == [(1, 2, 3), (4,), (1, 2, 3), (4,), (1, 2, 3)]
    assert [request.output_tokens for request in requests] == [8, 5, 8, 5, 8]
    assert len({request.prompt[0] for request in requests}) == 5


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([""], r"team\.jsonl: it holds no prompt"),
        (['{"prompt": "w1"}', "{"], r"team\.jsonl, line 2: not valid JSON"),
        (['{"text": "w1"}'], r'line 1: no text under the key "prompt"'),
        (['{"prompt": "w1", "output_tokens": 1}'], r"line 1: output_tokens is 1"),
        (
            ['{"prompt": "' + "w1 " * 60 + '"}'],
            r"line 1: 60 prompt tokens, 1 drawn and 8 .* max_model_len 64",
        ),
    ],
)
def test_bad_prompts_files_are_named(tmp_path: Path, real_model: Path, lines: list[str], named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        make_source(prompts(tmp_path, *lines), real_model, 7, 64)


def test_missing_prompts_file_is_named(real_model: Path) -> None:
    workload = PromptsWorkload(kind="prompts", file="nowhere/team.jsonl", output_tokens=8)
    with pytest.raises(UserInputError, match=r"load\.workload\.file nowhere/team\.jsonl: no such file"):
        make_source(workload, real_model, 7, 64)
