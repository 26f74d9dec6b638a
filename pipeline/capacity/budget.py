"""The budget: what is left of the device for the KV pool, term by term, with a band.

u*V - W - A - O of the seed formula, with A + O split as the engine splits it: peak activations, memory outside PyTorch, CUDA
graphs (vLLM 0.32 v1/worker/gpu_worker.py: available = ceil(total * u) - weights - peak activation - non-torch - graphs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.errors import UserInputError

GIB = 1024**3


@dataclass(frozen=True)
class Term:
    """One overhead in bytes, with the lowest and highest value that it is believed to take."""

    name: str
    value_bytes: int
    low_bytes: int
    high_bytes: int
    driver: str = ""
    """What it comes from, in a few words."""
    calibrated: bool = False
    """Whether it was measured on this card, so that lying outside the band is an error and no news."""

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes <= self.value_bytes <= self.high_bytes:
            raise UserInputError(
                f"overhead {self.name}: needs 0 <= low <= value <= high, got {self.low_bytes / GIB:.3f}, "
                f"{self.value_bytes / GIB:.3f}, {self.high_bytes / GIB:.3f} GiB"
            )

    @classmethod
    def exact(cls, name: str, value_bytes: int) -> Term:
        return cls(name, value_bytes, value_bytes, value_bytes, calibrated=True)

    @property
    def is_exact(self) -> bool:
        return self.low_bytes == self.value_bytes == self.high_bytes


@dataclass(frozen=True)
class Card:
    """V, u and A + O of one device; `held_bytes` is what others (a desktop, a second process) hold of it.

    Beside u*V the engine has memory that no budget counts: `context_bytes`, taken before it looks how much is free (vLLM 0.32
    v1/worker/gpu_worker.py: the CUDA context comes before init_snapshot), and `workspace_bytes`, taken after it has sized its pool.
    """

    memory_bytes: int
    utilization: float
    overheads: tuple[Term, ...]
    held_bytes: int = 0
    context_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise UserInputError(f"utilization is {self.utilization}; it must lie in (0, 1]")
        if self.memory_bytes <= 0:
            raise UserInputError(f"device memory is {self.memory_bytes} bytes, it must be positive")
        if not 0 <= self.held_bytes < self.memory_bytes:
            raise UserInputError(
                f"{self.held_bytes / GIB:.2f} GiB are said to be held by others; it must be less than the device's "
                f"{self.memory_bytes / GIB:.2f} GiB"
            )

    @property
    def requested_bytes(self) -> int:
        """What the engine asks for: ceil(total * u) (vLLM v1/worker/utils.py, request_memory)."""
        return math.ceil(self.memory_bytes * self.utilization)

    @property
    def startable(self) -> bool:
        """The engine refuses to start where less than that is free once it has its own context."""
        return self.requested_bytes <= self.free_bytes

    @property
    def free_bytes(self) -> int:
        """What the engine finds free: all but what others hold and its own context."""
        return self.memory_bytes - self.held_bytes - self.context_bytes

    @property
    def left_outside_bytes(self) -> int:
        """What stays free beside its share and its workspace: the room for spikes. Negative: it will run out."""
        return self.free_bytes - self.requested_bytes - self.workspace_bytes

    @property
    def highest_utilization(self) -> float:
        """The largest utilization, in whole hundredths, that still starts beside what others hold."""
        return math.floor(100 * self.free_bytes / self.memory_bytes) / 100

    @property
    def overhead_bytes(self) -> int:
        return sum(term.value_bytes for term in self.overheads)

    def budget(self, weight_bytes: int) -> Budget:
        """The KV budget beside `weight_bytes` of weights, on one rank; may be negative.

        The band takes the terms as independent: their distances to the expected value add in quadrature, as errors do.
        """
        left = self.requested_bytes - weight_bytes - self.overhead_bytes
        above = math.hypot(*(term.high_bytes - term.value_bytes for term in self.overheads))
        below = math.hypot(*(term.value_bytes - term.low_bytes for term in self.overheads))
        return Budget(left, math.floor(left - above), math.ceil(left + below))

    def require_budget(self, weight_bytes: int, what: str = "weights") -> Budget:
        """The same; `UserInputError` says by how much it doesn't fit."""
        found = self.budget(weight_bytes)
        if found.bytes <= 0:
            raise UserInputError(
                f"nothing is left for the KV pool: {self.utilization} x {self.memory_bytes / GIB:.2f} GiB is "
                f"{-found.bytes / GIB:.2f} GiB less than {what} ({weight_bytes / GIB:.2f} GiB) plus overhead "
                f"({self.overhead_bytes / GIB:.2f} GiB)"
            )
        return found


@dataclass(frozen=True)
class Budget:
    """Bytes for the KV pool: expected, and at the ends of the overheads' band."""

    bytes: int
    low_bytes: int
    high_bytes: int
