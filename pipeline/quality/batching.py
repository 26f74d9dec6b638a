"""How many eval items the engine computes at once: as many as it would serve, one, or as many with its batch-invariant kernels.

What an item's answer is depends, in its last bits, on what it is computed beside: 16-bit sums are taken in another order. A deployed
server always batches, so that is what is scored; the A/A control then measures how much of a difference is the batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["served", "serial", "invariant"]

INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's mode in which an answer doesn't depend on the batch (envs.py 0.32). Other kernels compute then than those that serve:
weights of AWQ leave Marlin, attention leaves backends without such a mode."""


@dataclass(frozen=True)
class Batching:
    """`max_num_seqs`: the scheduler's limit. `in_flight`: requests that the client keeps open. `variables`: of the engine's."""

    max_num_seqs: int
    in_flight: int
    variables: Mapping[str, str] = field(default_factory=dict)


def batching_of(mode: Mode, max_num_seqs: int) -> Batching:
    """What `mode` means to a server that is deployed with `max_num_seqs`.

    As many requests are open as the scheduler may run, so that what waits does so for room in the KV pool, as in deployment. With
    one at a time a second one is open, so that the engine doesn't wait for the client.
    """
    if mode == "serial":
        return Batching(1, 2)
    return Batching(max_num_seqs, max(2, max_num_seqs), {INVARIANT: "1"} if mode == "invariant" else {})
