"""From terms to an answer: one variant's capacity on one card, with its band, and term by term beside a hand calculation.

Pure: plain numbers in, frozen values out. What was counted (weight bytes of a checkpoint) and what was computed (weight bytes
from geometry) look the same here; the caller says which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.capacity.budget import GIB, Budget, Card
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import NONE_SKIPPED
from pipeline.capacity.pool import EngineRules, KvPool, Layout, kv_layout
from pipeline.errors import UserInputError


@dataclass(frozen=True)
class Row:
    """One variant's capacity on one card. `pool` at the expected overheads, `pool_low`, `pool_high` at the band's ends."""

    variant: str
    weights: str
    kv_cache_dtype: str
    weight_bytes: int
    """Of the fullest rank."""
    layout: Layout
    budget: Budget
    pool: KvPool
    pool_low: KvPool
    pool_high: KvPool

    @property
    def kappa_bytes(self) -> int:
        return self.layout.kappa_bytes

    def at(self, max_model_len: int) -> KvPool:
        """The same pool read at another length."""
        return self.layout.pool(max(0, self.budget.bytes), max_model_len)


def plan_row(
    variant: str,
    weights: str,
    kv_cache_dtype: str,
    geometry: Geometry,
    rank_weights: tuple[int, ...],
    card: Card,
    rules: EngineRules,
    max_model_len: int,
    tensor_parallel: int = 1,
    skipped: frozenset[int] = NONE_SKIPPED,
) -> Row:
    """Capacity of one variant. `rank_weights`: bytes on a rank of each pipeline stage, so one entry on one card.

    `UserInputError` when the weights leave nothing or max_model_len is above the model's own.
    """
    if max_model_len > geometry.max_position:
        raise UserInputError(
            f"max_model_len {max_model_len} is above the model's own {geometry.max_position}"
        )
    layout = kv_layout(geometry, kv_cache_dtype, rules, tensor_parallel, len(rank_weights), skipped)
    budgets = [card.require_budget(size, f"the {weights} weights") for size in rank_weights]

    def pool(of: Callable[[Budget], int]) -> KvPool:
        return layout.pool([of(budget) for budget in budgets], max_model_len)

    tightest = min(range(len(budgets)), key=lambda rank: budgets[rank].bytes)
    return Row(
        variant, weights, kv_cache_dtype, rank_weights[tightest], layout, budgets[tightest],
        pool(lambda budget: budget.bytes), pool(lambda budget: budget.low_bytes), pool(lambda budget: budget.high_bytes),
    )  # fmt: skip


@dataclass(frozen=True)
class HandCalculation:
    """The arithmetic as done by hand, with round figures: N = floor((u*V - W - (A+O)) / (kappa*S))."""

    memory_bytes: int
    utilization: float
    weight_bytes: int
    overhead_bytes: int

    @property
    def budget_bytes(self) -> int:
        return int(self.utilization * self.memory_bytes) - self.weight_bytes - self.overhead_bytes

    def sequences(self, kappa_bytes: int, max_model_len: int) -> int:
        return max(0, self.budget_bytes) // (kappa_bytes * max_model_len)


@dataclass(frozen=True)
class Step:
    """One term of the hand calculation replaced by the engine's: the budget and the sequences after it."""

    term: str
    by_hand: str
    real: str
    budget_bytes: int
    sequences: int


def explain(hand: HandCalculation, row: Row, card: Card) -> list[Step]:
    """From the hand calculation to the engine's number, one term after another; the last step is the row's own answer."""
    length, kappa = row.pool.max_model_len, row.kappa_bytes
    steps = [Step("by hand", "", "", hand.budget_bytes, hand.sequences(kappa, length))]
    changes: tuple[tuple[str, str, Any, Callable[[Any], str]], ...] = (
        ("device memory", "memory_bytes", card.memory_bytes, _gib),
        ("utilization", "utilization", card.utilization, "{:g}".format),
        ("weights", "weight_bytes", row.weight_bytes, _gib),
        ("overhead", "overhead_bytes", card.overhead_bytes, _gib),
    )
    now = hand
    for term, field, real, show in changes:
        now = replace(now, **{field: real})
        before = show(getattr(hand, field))
        steps.append(Step(term, before, show(real), now.budget_bytes, now.sequences(kappa, length)))
    whole = row.pool.blocks // row.pool.blocks_per_sequence
    steps.append(Step("whole blocks", "tokens", f"blocks of {row.pool.block_size}", now.budget_bytes, whole))
    steps.append(Step("null block", "0", "1 block", now.budget_bytes, row.pool.fitting_sequences))
    return steps


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
