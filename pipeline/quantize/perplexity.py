"""Perplexity of a causal language model on held-out text, in fixed windows.

Windows don't overlap and each starts cold, so the absolute value is higher than a published one; only the ratio
of two models on the same windows is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def perplexity(
    model: Any, pieces: Sequence[Sequence[int]], on_piece: Callable[[int], None]
) -> tuple[float, int]:
    """exp(mean negative log-likelihood per predicted token) and the number of predicted tokens.

    `on_piece` is called with the count of windows done. NaN logits give NaN.
    """
    total_nll, predicted_tokens = 0.0, 0
    for done, piece in enumerate(pieces):
        ids = torch.tensor([list(piece)], device=model.device)
        with torch.inference_mode():
            output = model(ids, use_cache=False)
        logits = output.logits[0, :-1].float()
        total_nll += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        predicted_tokens += len(piece) - 1
        on_piece(done + 1)
    mean_nll = total_nll / predicted_tokens
    return (math.inf if mean_nll > 700 else math.exp(mean_nll)), predicted_tokens


def see_caches(
    model: Any,
    pieces: Sequence[Sequence[int]],
    on_cache: Callable[[Any], None],
    on_piece: Callable[[int], None],
) -> None:
    """Each piece's KV cache to `on_cache`, and the count of those done to `on_piece`."""
    for done, piece in enumerate(pieces):
        ids = torch.tensor([list(piece)], device=model.device)
        with torch.inference_mode():
            # Nobody reads the logits, which of thousands of tokens would take more room than the cache.
            on_cache(model(ids, use_cache=True, logits_to_keep=1).past_key_values)
        on_piece(done + 1)
