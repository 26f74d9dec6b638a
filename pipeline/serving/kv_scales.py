"""Does the KV cache that the engine took have the dtype and the scales that the variant means?

At scale 1.0 keys and values beyond 448 saturate; with a checkpoint's calibrated scales they don't. Both run without an error and
only the answers tell, so numbers of the one must never be shown as those of the other. Versions of vLLM dropped a checkpoint's
scales silently (issue 54623), and took an FP8 cache from such a checkpoint where none was named.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

from pipeline.errors import EngineFailedError
from pipeline.models.check import read_scalars
from pipeline.serving.signals import LogSignals

SCALE_SUFFIXES = (".k_scale", ".v_scale")
SAME = {"fp8_e4m3": "fp8"}  # the engine's two names of one format
LAYER = re.compile(r"layers\.(\d+)\.")
ENGINE_SUFFIX = ".attn"  # what vLLM's models append to the checkpoint's name of an attention module


def checkpoint_scales(folder: Path) -> dict[str, tuple[float, float]]:
    """Attention module -> its scales of keys and values as stored; empty for a checkpoint without."""
    found = read_scalars(folder, SCALE_SUFFIXES)
    modules = sorted({name.rsplit(".", 1)[0] for name in found})
    return {module: (found[f"{module}.k_scale"], found[f"{module}.v_scale"]) for module in modules}


def check_kv_cache(
    name: str,
    folder: Path,
    kv_cache_dtype: str,
    kv_scales: Literal["one", "checkpoint"] | None,
    log: LogSignals,
    log_path: Path,
    skipped: frozenset[int] = frozenset(),
) -> None:
    """Raise `EngineFailedError` where the engine's KV cache isn't the one that the variant `name` means.

    `folder`: the checkpoint; dtype, scales and skipped layers as in the variant's settings. What the log doesn't tell isn't judged here: the gate `kernel-provenance` makes it INCONCLUSIVE.
    """
    problem = _problem(folder, kv_cache_dtype, kv_scales, log, skipped)
    if problem is not None:
        raise EngineFailedError(f"{name}: {problem}; its log is {log_path}")


def _problem(
    folder: Path, kv_cache_dtype: str, kv_scales: str | None, log: LogSignals, skipped: frozenset[int]
) -> str | None:
    if log.kv_cache_dtype in (None, "auto"):  # can be either
        return None
    if SAME.get(log.kv_cache_dtype, log.kv_cache_dtype) != kv_cache_dtype:
        return f"the variant means a {kv_cache_dtype} KV cache, but the engine took {log.kv_cache_dtype}"
    if kv_scales is None or log.kv_scales is None:
        return None
    if log.kv_scales_apart:
        return f"the engine holds two different KV scales for {log.kv_scales_apart[0]}, so kernels may use either"
    if kv_scales == "one":
        if log.kv_scales != "1.0":
            return "the variant means KV scales of 1.0 (kv_scales: one), but the engine took the checkpoint's"
        return None
    if log.kv_scales == "1.0":
        return (
            "the variant means calibrated KV scales (kv_scales: checkpoint), but the engine runs at scale 1.0: those in "
            f"{folder} did not reach it"
        )
    return _difference(
        _without(skipped, checkpoint_scales(folder)), _without(skipped, log.kv_scales_by_layer), folder
    )


def _without(
    skipped: frozenset[int], scales: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """A layer that keeps 16 bits has no use for its scales; the engine puts 1.0 in their place."""
    return {name: pair for name, pair in scales.items() if not skipped & set(map(int, LAYER.findall(name)))}


def _difference(
    stored: dict[str, tuple[float, float]], taken: dict[str, tuple[float, float]], folder: Path
) -> str | None:
    """The first layer whose scales in the engine aren't the stored ones."""
    engine = {name.removesuffix(ENGINE_SUFFIX): pair for name, pair in taken.items()}
    if engine.keys() != stored.keys():
        odd = sorted(engine.keys() ^ stored.keys())[0]
        where = "the engine" if odd in engine else str(folder)
        return f"the engine has KV scales of {len(engine)} layers, {folder} of {len(stored)}; only {where} has {odd}"
    for module, pair in stored.items():
        for label, mine, theirs in zip(("k_scale", "v_scale"), pair, engine[module]):
            # Widened to float32, which is exact; anything else is another number.
            if not math.isclose(mine, theirs, rel_tol=1e-6):
                return f"{module}.{label} is {mine:.6g} in {folder}, but {theirs:.6g} in the engine"
    return None
