"""The budget: what is left of the device for the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import UserInputError

GIB = 1024**3


@dataclass(frozen=True)
class Budget:
    """The terms of u*V - W - A - O, in bytes (`utilization` is a share in (0, 1])."""

    memory_bytes: int
    utilization: float
    weight_bytes: int
    overhead_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes for the KV pool; negative when the weights alone don't fit."""
        return int(self.utilization * self.memory_bytes) - self.weight_bytes - self.overhead_bytes


def kv_budget_bytes(memory_bytes: int, utilization: float, weight_bytes: int, overhead_bytes: int) -> int:
    """floor(u*V) - W - (A + O); `UserInputError` says by how much when nothing is left."""
    if not 0 < utilization <= 1:
        raise UserInputError(f"utilization is {utilization}; it must lie in (0, 1]")
    left = Budget(memory_bytes, utilization, weight_bytes, overhead_bytes).kv_bytes
    if left <= 0:
        raise UserInputError(
            f"nothing is left for the KV pool: {utilization} x {memory_bytes / GIB:.2f} GiB is {-left / GIB:.2f} GiB less "
            f"than weights ({weight_bytes / GIB:.2f} GiB) plus overhead ({overhead_bytes / GIB:.2f} GiB)"
        )
    return left
