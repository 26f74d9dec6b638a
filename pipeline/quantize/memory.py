"""Peak memory of a child process, for its result."""

from __future__ import annotations

import resource


def peak_memory() -> dict[str, int | None]:
    """Bytes of host memory this process held at most, and of device memory on CUDA (null elsewhere)."""
    import torch

    return {
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
