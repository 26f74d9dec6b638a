"""Perplexity against values that can be worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.quantize.perplexity import perplexity, see_caches


class FixedModel:
    """Gives the same logits at every position."""

    device = "cpu"

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, ids: Any, use_cache: bool, logits_to_keep: int = 0) -> Any:
        cache = (ids.tolist(), logits_to_keep) if use_cache else None
        return SimpleNamespace(logits=self.logits.expand(1, ids.shape[1], -1), past_key_values=cache)


def test_every_pieces_cache_is_shown_once_and_no_logits_are_asked_for() -> None:
    seen: list[Any] = []
    done: list[int] = []
    see_caches(FixedModel([0.0]), [[1, 2, 3], [4]], seen.append, done.append)
    assert (seen, done) == ([([[1, 2, 3]], 1), ([[4]], 1)], [1, 2])


def test_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    value, tokens = perplexity(FixedModel([0.0] * 10), [[1, 2, 3], [4, 5]], lambda done: None)
    assert value == pytest.approx(10.0)
    assert tokens == 3  # the first token of each window is not predicted


def test_perplexity_weighs_tokens_not_windows() -> None:
    model = FixedModel([math.log(0.8), math.log(0.2)])
    value, tokens = perplexity(model, [[0, 0, 0, 0], [0, 1]], lambda done: None)
    assert tokens == 4
    assert value == pytest.approx(math.exp(-(3 * math.log(0.8) + math.log(0.2)) / 4))


def test_nan_is_not_a_number_and_overflow_is_infinite() -> None:
    assert math.isnan(perplexity(FixedModel([float("nan"), 0.0]), [[0, 1]], lambda done: None)[0])
    assert perplexity(FixedModel([0.0, 5000.0]), [[0, 0]], lambda done: None)[0] == math.inf
