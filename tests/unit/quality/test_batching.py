"""How many items at once, and the guard that stands in for a limit on how long one may take."""

from __future__ import annotations

import itertools

import pytest

from pipeline.compatibility.invariance import invariance_refusals
from pipeline.compatibility.weights import Engine
from pipeline.errors import EngineFailedError
from pipeline.quality import stall
from pipeline.quality.batching import INVARIANT, batching_of
from pipeline.quality.stall import StallGuard


def test_served_is_as_deployed_serial_is_one_and_invariant_says_so_to_the_engine() -> None:
    served, serial, invariant = (batching_of(mode, 128) for mode in ("served", "serial", "invariant"))
    assert (served.max_num_seqs, served.in_flight, served.variables) == (128, 128, {})
    assert (serial.max_num_seqs, serial.in_flight) == (1, 2)
    assert (invariant.max_num_seqs, invariant.variables) == (128, {INVARIANT: "1"})
    assert batching_of("served", 1).in_flight == 2


@pytest.mark.parametrize(("sequences", "prompts"), [(1, 1), (7, 1), (16, 2), (64, 8), (128, 16)])
def test_prompts_of_a_request_leave_eight_requests_in_flight(sequences: int, prompts: int) -> None:
    assert batching_of("served", sequences).prompts_per_request == prompts
    assert batching_of("invariant", sequences).prompts_per_request == prompts
    assert batching_of("serial", sequences).prompts_per_request == 1


@pytest.mark.parametrize(("kind", "capability", "refused"), [
    ("cuda", 89, False), ("cuda", 80, False), ("cuda", 75, True), ("cuda", None, False), ("cpu", None, True),
])  # fmt: skip
def test_batch_invariance_needs_capability_8(kind: str, capability: int | None, refused: bool) -> None:
    found = invariance_refusals(Engine("0.32.0", kind, capability))  # type: ignore[arg-type]
    assert bool(found) == refused
    assert all("served or serial" in refusal.fix for refusal in found)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(stall.time, "monotonic", lambda: self.now)


def test_an_engine_whose_counters_stand_still_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    guard = StallGuard(lambda: (5, 7), timeout_s=60)
    for _ in range(12):  # the first look sees other counters than none
        clock.now += 5
        guard.check()
    clock.now += 5
    with pytest.raises(EngineFailedError, match="no token for 60 s"):
        guard.check()


@pytest.mark.parametrize("sign", ["counters", "answers"])
def test_moving_counters_or_answers_are_signs_of_life(monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    clock = Clock(monkeypatch)
    counter = itertools.count()
    guard = StallGuard(lambda: next(counter) if sign == "counters" else 0, timeout_s=60)
    for _ in range(100):
        clock.now += 50
        if sign == "answers":
            guard.answered()
        guard.check()


def test_the_engine_is_asked_once_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch), []
    guard = StallGuard(lambda: asked.append(1), timeout_s=60)
    clock.now += 5
    for _ in range(1000):
        guard.check()
    assert len(asked) == 1
