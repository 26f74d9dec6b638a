"""Divergence figures against distributions whose answers are known by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from pipeline.errors import UserInputError
from pipeline.quality.divergence import ScoredPrompt, ScoredStream, diverge, truncated_kl
from pipeline.quality.stream import read_stream, stream_of, stream_sha256, write_stream

VOCABULARY, LENGTH, TOP_K = 50, 30, 10


def scored(logits: np.ndarray, tokens: np.ndarray, top_k: int = TOP_K, per_cluster: int = 1) -> ScoredStream:
    """A stream of which every distribution is known: logits are (prompts, LENGTH − 1, VOCABULARY)."""
    logprobs = special.log_softmax(logits, axis=-1)
    prompts = []
    for index, (rows, ids) in enumerate(zip(logprobs, tokens, strict=True)):
        top = np.argsort(-rows, axis=1)[:, :top_k]
        prompts.append(
            ScoredPrompt(
                f"p{index}",
                f"c{index // per_cluster}",
                LENGTH // 2,
                tuple(map(int, ids)),
                tuple(map(float, rows[np.arange(LENGTH - 1), ids[1:]])),
                tuple(tuple(map(int, row)) for row in top),
                tuple(tuple(map(float, row)) for row in np.take_along_axis(rows, top, axis=1)),
            )
        )
    stream = ScoredStream("", top_k, tuple(prompts))
    return replace(stream, sha256=stream_sha256(stream_of(stream)))


@pytest.fixture(scope="module")
def both() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    base = rng.normal(0, 3, (40, LENGTH - 1, VOCABULARY))
    return base, base + rng.normal(0, 0.3, base.shape), rng.integers(0, VOCABULARY, (40, LENGTH))


def test_figures_are_those_of_the_full_distributions(both: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    base, other, tokens = both
    found = diverge(scored(base, tokens), scored(other, tokens), 0.95)
    p, q = special.log_softmax(base, axis=-1), special.log_softmax(other, axis=-1)
    at = (np.arange(40)[:, None], np.arange(LENGTH - 1)[None, :], tokens[:, 1:])
    assert (found.prompts, found.tokens) == (40, 40 * (LENGTH - 1))
    assert found.perplexity_ratio.value == pytest.approx(math.exp((p[at] - q[at]).mean()))
    assert found.perplexity == pytest.approx(math.exp(-q[at].mean()))
    change = np.exp(q[at]) - np.exp(p[at])
    assert found.delta_p_rms.value == pytest.approx(math.sqrt((change**2).mean()))
    assert found.delta_p_percentiles["95"].value == pytest.approx(np.quantile(change, 0.95))
    assert found.same_top1.value == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    full = stats.entropy(np.exp(p), np.exp(q), axis=-1).mean()
    assert 0.8 * full < found.kl.value <= full + 1e-12  # a lower bound, near to it
    assert 0 < found.kl_tail_mass < 0.15


def test_with_the_whole_vocabulary_the_divergence_is_scipys(
    both: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    base, other, tokens = both
    found = diverge(scored(base, tokens, VOCABULARY), scored(other, tokens, VOCABULARY), 0.95)
    full = stats.entropy(special.softmax(base, axis=-1), special.softmax(other, axis=-1), axis=-1)
    assert found.kl.value == pytest.approx(full.mean(), rel=1e-4)
    assert found.kl_percentiles["90"].value == pytest.approx(np.quantile(full, 0.9), rel=1e-4)
    assert found.kl_tail_mass == pytest.approx(0.0, abs=1e-6)


def test_a_run_against_itself_diverges_by_nothing(both: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    stream = scored(both[0], both[2])
    found = diverge(stream, stream, 0.95)
    assert (found.kl.value, found.same_top1.value, found.perplexity_ratio.value) == (0.0, 1.0, 1.0)
    assert found.delta_p_rms.value == 0.0 and found.delta_p_rms.se is None


def test_prompts_of_one_source_are_not_independent(both: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """The same prompt four times over is worth one: the standard error doubles against the naive one."""
    base, other, tokens = (np.repeat(array, 4, axis=0) for array in both)
    naive = diverge(scored(base, tokens), scored(other, tokens), 0.95)
    grouped = diverge(scored(base, tokens, per_cluster=4), scored(other, tokens, per_cluster=4), 0.95)
    assert naive.kl.se is not None and grouped.kl.se is not None
    assert grouped.kl.se == pytest.approx(2 * naive.kl.se, rel=0.05)
    percentile, wide = naive.kl_percentiles["90"].se, grouped.kl_percentiles["90"].se
    assert percentile is not None and wide is not None and wide > 1.4 * percentile


def test_standard_errors_are_the_spread_of_repetitions() -> None:
    rng = np.random.default_rng(8)
    figures, errors = [], []
    for _ in range(60):
        base = rng.normal(0, 3, (20, LENGTH - 1, VOCABULARY))
        other = base + rng.normal(0, 0.3, base.shape)
        tokens = rng.integers(0, VOCABULARY, (20, LENGTH))
        found = diverge(scored(base, tokens, 5), scored(other, tokens, 5), 0.95)
        figures.append([found.kl.value, found.perplexity_ratio.value, found.delta_p_rms.value])
        errors.append([found.kl.se, found.perplexity_ratio.se, found.delta_p_rms.se])
    assert np.mean(errors, axis=0) == pytest.approx(np.std(figures, axis=0), rel=0.35)


def test_unmatched_tokens_are_lumped_by_hand() -> None:
    """p = (0.5, 0.3 | 0.2), q knows only the first: (0.4 | 0.6). KL of the lumped pair (0.5, 0.5) against (0.4, 0.6)."""
    value, tail = truncated_kl([7, 8], [math.log(0.5), math.log(0.3)], {7: math.log(0.4)})
    assert tail == pytest.approx(0.5)
    assert value == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))


def test_another_stream_is_refused_by_prompt(both: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    base, other, tokens = both
    moved = tokens.copy()
    moved[3, 5] = (moved[3, 5] + 1) % VOCABULARY
    with pytest.raises(UserInputError, match="differ at p3"):
        diverge(scored(base, tokens), scored(other, moved), 0.95)
    with pytest.raises(UserInputError, match="kept the 10 likeliest tokens, the variant 5"):
        diverge(scored(base, tokens), scored(other, tokens, 5), 0.95)


def test_no_numbers_and_no_stream_are_refused(both: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    stream = scored(both[0], both[2])
    first = replace(stream.prompts[0], logprobs=(math.nan, *stream.prompts[0].logprobs[1:]))
    with pytest.raises(UserInputError, match="variant has logprobs that are no numbers in p0"):
        diverge(stream, replace(stream, prompts=(first, *stream.prompts[1:])), 0.95)
    with pytest.raises(UserInputError, match="scored no token stream"):
        diverge(replace(stream, prompts=()), stream, 0.95)


def test_a_stream_is_read_back_as_it_was_written(
    both: tuple[np.ndarray, np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    stream = scored(both[0], both[2])
    path = write_stream(tmp_path / "quality" / "v.logprobs.parquet", stream)
    assert read_stream(path) == stream
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    write_stream(path, replace(stream, sha256="0" * 64))
    with pytest.raises(UserInputError, match="aren't those of its hash"):
        read_stream(path)
    path.write_bytes(b"PAR1 cut")
    with pytest.raises(UserInputError, match="isn't a scored token stream"):
        read_stream(path)
    with pytest.raises(UserInputError, match="no such file"):
        read_stream(tmp_path / "none.parquet")
