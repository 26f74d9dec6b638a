"""How many prompts of the eval the engine computes at once: as many as it would serve, one, or as many with its batch-invariant kernels.

What an item's answer is depends, in its last bits, on what it is computed beside: 16-bit sums are taken in another order. A deployed
server always batches, so that is what is scored; the A/A control then measures how much of a difference is the batch's.

What an item's choices have in common is computed anew for each. The prefix cache holds keys and values, no logprobs: vLLM 0.32 doesn't
read it for a request that wants a prompt's (sampling_params.py, `skip_reading_prefix_cache`), earlier ones returned those of other requests
(issue 42019). So nothing can be reused with scores that are provably the same, and it stays off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["served", "serial", "invariant"]

INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's mode in which an answer doesn't depend on the batch (envs.py 0.32). Other kernels compute then than those that serve:
weights of AWQ leave Marlin, attention leaves backends without such a mode."""


REQUESTS = 8
"""So many requests are open where their prompts are as many as the scheduler may run: the engine has work while one of them travels."""


@dataclass(frozen=True)
class Batching:
    """`max_num_seqs`: the scheduler's limit. `in_flight`: prompts that the client keeps open, and `prompts_per_request` of them
    go in one request where they are scored. `variables`: of the engine's."""

    max_num_seqs: int
    in_flight: int
    prompts_per_request: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


def batching_of(mode: Mode, max_num_seqs: int) -> Batching:
    """What `mode` means to a server that is deployed with `max_num_seqs`.

    As many prompts are open as the scheduler may run, so that what waits does so for room in the KV pool, as in deployment. With
    one at a time a second one is open, so that the engine doesn't wait for the client.
    """
    if mode == "serial":
        return Batching(1, 2)
    variables = {INVARIANT: "1"} if mode == "invariant" else {}
    return Batching(max_num_seqs, max(2, max_num_seqs), max(1, max_num_seqs // REQUESTS), variables)
