"""From terms to an answer: one row per variant, and the levers that raise concurrency, in order.

Pure: plain numbers in, frozen values out. What was counted (weight bytes of a checkpoint) and what was computed
(weight bytes from geometry) look the same here; the caller says which it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.capacity.budget import kv_budget_bytes
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import KvPool, kappa_bytes, kv_pool
from pipeline.errors import UserInputError


@dataclass(frozen=True)
class Card:
    """V, u and A + O of one device."""

    memory_bytes: int
    utilization: float
    overhead_bytes: int


@dataclass(frozen=True)
class Row:
    """One variant's capacity on one card."""

    variant: str
    weights: str
    kv_cache_dtype: str
    weight_bytes: int
    kappa_bytes: int
    budget_bytes: int
    pool: KvPool

    @property
    def formula_sequences(self) -> int:
        """floor(budget / (kappa * S)): the textbook's number, without blocks."""
        return self.budget_bytes // (self.kappa_bytes * self.pool.max_model_len)


@dataclass(frozen=True)
class Lever:
    """One change: `sequences` with it on top of those before it, `alone` with only it."""

    change: str
    sequences: int
    alone: int
    risk: str


def plan_row(
    variant: str,
    weights: str,
    kv_cache_dtype: str,
    geometry: Geometry,
    weight_bytes: int,
    card: Card,
    block_size: int,
    max_model_len: int,
) -> Row:
    """Capacity of one variant; `UserInputError` when the weights leave nothing or max_model_len is above the model's."""
    if max_model_len > geometry.max_position:
        raise UserInputError(
            f"max_model_len {max_model_len} is above the model's own {geometry.max_position}"
        )
    kappa = kappa_bytes(geometry, kv_cache_dtype)
    budget = kv_budget_bytes(card.memory_bytes, card.utilization, weight_bytes, card.overhead_bytes)
    pool = kv_pool(budget, kappa, block_size, max_model_len)
    return Row(variant, weights, kv_cache_dtype, weight_bytes, kappa, budget, pool)


def levers(
    geometry: Geometry,
    scheme_bytes: Mapping[str, int],
    card: Card,
    block_size: int,
    max_model_len: int,
    required: int,
    schemes: Sequence[str],
) -> list[Lever]:
    """The ordered levers from BF16/BF16 to `required` sequences: weights, KV dtype, max_model_len, a second card.

    Weights first because they are the largest fixed cost; the order is the caller's only for the quantized schemes.
    """

    def fits(weights: str, kv: str, length: int, cards: int = 1) -> int:
        budget = card.utilization * card.memory_bytes - scheme_bytes[weights] / cards - card.overhead_bytes
        return kv_pool(int(budget), kappa_bytes(geometry, kv, cards), block_size, length).fitting_sequences

    base = ("bf16", "bfloat16", max_model_len)
    quantized = next((name for name in schemes if name != "bf16"), None)
    found: list[Lever] = []
    now = base
    if quantized:
        now = (quantized, now[1], now[2])
        found.append(
            Lever(
                f"{quantized} weights",
                fits(*now),
                fits(*now),
                "a few points on some tasks; measure on your set",
            )
        )
    now = (now[0], "fp8", now[2])
    found.append(
        Lever(
            "FP8 KV cache",
            fits(*now),
            fits("bf16", "fp8", max_model_len),
            "can wreck outputs at scale 1.0 (Qwen2.5); calibrate",
        )
    )
    shorter = _longest_for(lambda length: fits(now[0], now[1], length), required, block_size, max_model_len)
    if shorter is not None and shorter < max_model_len:
        alone = fits("bf16", "bfloat16", shorter)
        found.append(
            Lever(
                f"max_model_len {shorter}",
                fits(now[0], now[1], shorter),
                alone,
                "longer requests are refused",
            )
        )
    if geometry.kv_heads >= 2:
        found.append(
            Lever(
                "second card (tensor parallel 2)", fits(*now, cards=2), fits(*base, cards=2),
                "cost, and traffic between the cards",
            )
        )  # fmt: skip
    return found


def _longest_for(fits: object, required: int, block_size: int, at_most: int) -> int | None:
    """The longest block-aligned length up to `at_most` at which `required` sequences fit; None when none does."""
    assert callable(fits)
    low, high = 0, -(-at_most // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(min(middle * block_size, at_most)) >= required:
            low = middle
        else:
            high = middle - 1
    return min(low * block_size, at_most) if low else None
