"""The inverse problem: what it takes to hold N sequences of S tokens, in the order in which one would try it.

Weights first, because they are the largest fixed cost; then the KV dtype, which halves what every sequence costs; then a shorter
max_model_len, which gives up requests; then utilization, which gives up the margin for spikes; a second card last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from pipeline.capacity.budget import Card
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import NONE_SKIPPED
from pipeline.capacity.pool import EngineRules, KvPool, kv_layout

WEIGHTS_RISK = "a few points of quality on some tasks: measure on your own set"
KV_RISK = "can wreck outputs at scale 1.0 (Qwen2.5 is known for it): calibrate, and measure"
LENGTH_RISK = "longer requests are refused"
UTILIZATION_RISK = "less room for spikes: starts fine, runs out of memory at a peak"
CARD_RISK = "twice the cost, and traffic between the cards"


@dataclass(frozen=True)
class Setup:
    """One point of the search. `cards`: tensor-parallel ranks."""

    weights: str
    kv_cache_dtype: str
    max_model_len: int
    utilization: float
    cards: int = 1
    skipped: frozenset[int] = NONE_SKIPPED
    """Layers whose KV cache keeps 16 bits."""


@dataclass(frozen=True)
class Lever:
    """One change: `sequences` with it on top of those before it, `alone` with only it."""

    key: str
    change: str
    sequences: int
    alone: int
    risk: str


@dataclass(frozen=True)
class Answer:
    """Whether `required` sequences can be reached, and how.

    `smallest`: the fewest levers that do, in order; a second card counts among them only where nothing else reaches.
    """

    required: int
    start: int
    levers: tuple[Lever, ...]
    smallest: tuple[str, ...] | None
    closest: int
    """What all levers together give: the best there is where `smallest` is None."""


class Planner:
    """Answers capacity questions about one model on cards of one kind.

    `weights`: scheme -> tensor_parallel -> bytes per rank. `card`: one, or KV dtype and tensor_parallel -> one, as overheads depend on
    both.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Mapping[str, Callable[[int], int]],
        card: Card | Callable[[str, int], Card],
        rules: EngineRules,
    ) -> None:
        self._geometry, self._weights, self._rules = geometry, weights, rules
        self._card_for: Callable[[str, int], Card] = (lambda *_: card) if isinstance(card, Card) else card

    def pool(self, setup: Setup) -> KvPool:
        """The pool of a setup; an empty one where the weights leave nothing."""
        card = replace(self._card_for(setup.kv_cache_dtype, setup.cards), utilization=setup.utilization)
        budget = card.budget(self._weights[setup.weights](setup.cards)).bytes
        layout = kv_layout(
            self._geometry, setup.kv_cache_dtype, self._rules, setup.cards, skipped=setup.skipped
        )
        return layout.pool(max(0, budget), setup.max_model_len)

    def sequences(self, setup: Setup) -> int:
        """Whole sequences of max_model_len tokens that fit."""
        return self.pool(setup).fitting_sequences

    def longest(self, setup: Setup, streams: int) -> int | None:
        """The largest length, up to the model's own and in whole blocks, at which `streams` sequences fit. None: not even one block."""
        layout = kv_layout(
            self._geometry, setup.kv_cache_dtype, self._rules, setup.cards, skipped=setup.skipped
        )
        size = layout.block_size
        top = self._geometry.max_position
        low, high = 0, -(-top // size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequences(replace(setup, max_model_len=min(middle * size, top))) >= streams:
                low = middle
            else:
                high = middle - 1
        return min(low * size, top) if low else None

    def answer(
        self, start: Setup, required: int, quantized: str | None, kv_dtype: str, utilization: float
    ) -> Answer:
        """The ordered levers from `start` to `required` sequences, what each brings, and the fewest that are enough."""
        changes = self._changes(start, required, quantized, kv_dtype, utilization)
        levers, now = [], start
        for key, text, change, risk in changes:
            now = change(now)
            levers.append(Lever(key, text, self.sequences(now), self.sequences(change(start)), risk))
        return Answer(
            required,
            self.sequences(start),
            tuple(levers),
            self._smallest(start, required, changes),
            self.sequences(now),
        )

    def _changes(
        self, start: Setup, required: int, quantized: str | None, kv_dtype: str, utilization: float
    ) -> list[tuple[str, str, Callable[[Setup], Setup], str]]:
        changes: list[tuple[str, str, Callable[[Setup], Setup], str]] = []
        if quantized and quantized != start.weights:
            changes.append(
                (
                    "weights",
                    f"{quantized} weights",
                    lambda setup: replace(setup, weights=quantized),
                    WEIGHTS_RISK,
                )
            )
        if kv_dtype != start.kv_cache_dtype:
            changes.append(
                ("kv", f"{kv_dtype} KV cache", lambda setup: replace(setup, kv_cache_dtype=kv_dtype), KV_RISK)
            )
        length = self._shorter(start, required, [change for _, _, change, _ in changes])
        if length is not None:
            changes.append(
                (
                    "length",
                    f"max_model_len {length:,}",
                    lambda setup: replace(setup, max_model_len=length),
                    LENGTH_RISK,
                )
            )
        if utilization > start.utilization:
            changes.append(
                (
                    "utilization", f"utilization {utilization:g}",
                    lambda setup: replace(setup, utilization=utilization), UTILIZATION_RISK,
                )
            )  # fmt: skip
        if self._can_split():
            changes.append(
                ("cards", "second card (tensor parallel 2)", lambda setup: replace(setup, cards=2), CARD_RISK)
            )
        return changes

    def _shorter(self, start: Setup, required: int, before: list[Callable[[Setup], Setup]]) -> int | None:
        """The length that reaches `required` on top of the levers before it; half of the start's where those are enough already."""
        now = start
        for change in before:
            now = change(now)
        if self.sequences(now) >= required:
            return start.max_model_len // 2 if start.max_model_len > 1 else None
        found = self.longest(now, required)
        return found if found is not None and found < start.max_model_len else None

    def _can_split(self) -> bool:
        for layer in self._geometry.layers:
            counts = [getattr(layer.mixer, name, 2) for name in ("heads", "state_heads")]
            if any(count % 2 for count in counts):
                return False
            kv_heads = getattr(layer.mixer, "kv_heads", 2)
            if kv_heads != 1 and kv_heads % 2:
                return False
        return True

    def _smallest(
        self, start: Setup, required: int, changes: list[tuple[str, str, Callable[[Setup], Setup], str]]
    ) -> tuple[str, ...] | None:
        """The fewest changes that reach `required`, hardware last; among equally few, those that come earlier in the order."""
        on_this_card = [change for change in changes if change[0] != "cards"]
        candidates = [
            chosen
            for among in (on_this_card, changes)
            for count in range(len(among) + 1)
            for chosen in combinations(among, count)
        ]
        for chosen in candidates:
            setup = start
            for _, _, change, _ in chosen:
                setup = change(setup)
            if self.sequences(setup) >= required:
                return tuple(text for _, text, _, _ in chosen)
        return None
