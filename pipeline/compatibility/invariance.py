"""Where the engine's batch-invariant mode runs. Read from vLLM 0.32."""

from __future__ import annotations

from pipeline.compatibility.refusal import Refusal
from pipeline.compatibility.weights import Engine

LOWEST = 80
SOURCE = "vLLM 0.32, docs/features/batch_invariance.md: compute capability 8.0 or higher"


def invariance_refusals(engine: Engine) -> list[Refusal]:
    """Why `evalset.batching: invariant` can't be had on this device; empty where it can, or where no card is known."""
    if engine.kind == "cuda" and (engine.capability is None or engine.capability >= LOWEST):
        return []
    has = "a CPU" if engine.kind == "cpu" else f"compute capability {(engine.capability or 0) / 10:.1f}"
    return [
        Refusal(
            f"evalset.batching invariant needs a card of compute capability {LOWEST / 10:.1f} or more, this is {has}",
            "set it to served or serial",
            SOURCE,
        )
    ]
