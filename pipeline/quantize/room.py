"""Is there room for a quantization? Asked before the first minute of it, in numbers.

Pure arithmetic on the geometry and the recipe, and the machine's free memory and disk.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.capacity.weights import weight_bytes as predicted_weight_bytes
from pipeline.compatibility import weight_scheme
from pipeline.errors import EnvironmentUnfitError
from pipeline.models.architectures import Geometry, expected_shapes, intermediate
from pipeline.settings.schema import QuantizeRecipe

GIB = 1024**3
# Measured on the 135M model in fp32 on a CPU, 2,048 tokens: 1.54 GiB at the peak, of which 0.50 are weights.
PROCESS_BYTES = int(0.75 * GIB)
"""Python, torch and the backend's imports."""
COPIES = 1.25
"""Weights held at once: the model, and of a part of it the original beside the quantized."""
TOKENIZER_BYTES = 64 * 1024**2
"""Vocabulary, merges and configs of the largest supported tokenizers, rounded up."""


@dataclass(frozen=True)
class Room:
    """What a quantization takes."""

    memory_bytes: int
    """Host memory."""
    disk_bytes: int
    """Beside the source: the checkpoint in the making. What it replaces is removed only after."""


def room_for(sizes: Geometry, recipe: QuantizeRecipe) -> Room:
    """The room that `recipe` takes on a CPU, where weights and activations are fp32. With a card the host needs less."""
    parameters = sum(math.prod(shape) for shape in expected_shapes(sizes).values())
    # Inputs of a layer's seven linear modules, kept for the search, and its own input and output.
    activations = recipe.samples * recipe.sequence_tokens * (8 * sizes.hidden + 2 * intermediate(sizes))
    return Room(
        memory_bytes=int(4 * (COPIES * parameters + activations)) + PROCESS_BYTES,
        disk_bytes=predicted_weight_bytes(sizes, weight_scheme(recipe)) + TOKENIZER_BYTES,
    )


def refuse_without_room(sizes: Geometry, recipe: QuantizeRecipe, out_dir: Path) -> None:
    """Raise `EnvironmentUnfitError` with both numbers where memory or disk is too small."""
    needed = room_for(sizes, recipe)
    folder = next(parent for parent in out_dir.absolute().parents if parent.is_dir())
    for what, found, wanted, fix in (
        ("of disk", shutil.disk_usage(folder).free, needed.disk_bytes, f"free some in {folder}"),
        ("of memory", free_memory(), needed.memory_bytes, "end other programs, lower samples, or use a larger machine"),
    ):  # fmt: skip
        if found < wanted:
            raise EnvironmentUnfitError(
                f"quantizing takes about {wanted / GIB:.2f} GiB {what}, and {found / GIB:.2f} GiB are free; {fix}"
            )


def free_memory() -> int:
    """Bytes that a process can still get: the machine's, or what is left of its container's limit (cgroup v2)."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        root = Path("/sys/fs/cgroup")
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free
