"""Which of the machine's cards an engine gets: the first ones that CUDA_VISIBLE_DEVICES leaves.

CUDA counts the fastest card first unless told otherwise; NVML, nvidia-smi and this project count in PCI bus order, and the
engine is told to do the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.results import Gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The cards that CUDA_VISIBLE_DEVICES names (indices or UUIDs, in its order); all of them where it isn't set."""
    wanted = (os.environ if environment is None else environment).get(VARIABLE)
    if wanted is None:
        return list(gpus)
    found = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        fitting = [gpu for gpu in gpus if _is_named(gpu, word)]
        if not fitting:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
            raise UserInputError(f"{VARIABLE} names {word!r}; this machine's cards are {known}")
        found += fitting
    return found


def _is_named(gpu: Gpu, word: str) -> bool:
    return word == str(gpu.index) if word.isdigit() else gpu.uuid.startswith(word)


def chosen(gpus: Sequence[Gpu], count: int, environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """The `count` cards that an engine gets; `EnvironmentUnfitError` where there aren't so many."""
    found = visible(gpus, environment)
    if len(found) < count:
        hidden = f"; {VARIABLE} hides {len(gpus) - len(found)}" if len(found) < len(gpus) else ""
        raise EnvironmentUnfitError(
            f"{count} {'card is' if count == 1 else 'cards are'} needed, and {len(found) or 'none'} visible{hidden}"
        )
    return found[:count]


def engine_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Variables that give an engine exactly these cards: by index, which every version reads, a slice by its UUID."""
    if not gpus:
        return {}
    names = [gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index) for gpu in gpus]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VARIABLE: ",".join(names)}


def lowest_capability(gpus: Iterable[Gpu]) -> int | None:
    """The lowest compute capability of some cards, 89 for 8.9; None without cards."""
    return min((int(gpu.compute_capability.replace(".", "")) for gpu in gpus), default=None)
