"""A checkpoint's FP8 KV scales, held against the keys and values that the same checkpoint makes on held-out text.

A scale says which range the cache covers: 448 * scale (e4m3's largest number). What lies beyond saturates; a range far wider
than what occurs spends the format's few steps on nothing. Values are those after AWQ's folding, which moves factors through v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.capacity.geometry import Geometry
from pipeline.errors import QuantgateError
from pipeline.models.architectures import layer_name
from pipeline.quantize.checkpoint import Checkpoint
from pipeline.settings.schema import QuantizeRecipe

FP8_MAX = 448.0  # torch.finfo(torch.float8_e4m3fn).max
# Held-out text is another text, and its largest key another key: within a factor of two of calibration's largest.
PLAUSIBLE_COVERAGE = (0.5, 2.0)
MAX_SATURATED_SHARE = 5e-3


@dataclass(frozen=True)
class LayerScales:
    """One layer's scales."""

    key: float
    value: float


def read_scales(stored: Checkpoint, sizes: Geometry, recipe: QuantizeRecipe) -> dict[int, LayerScales]:
    """Layer -> its scales; none where the recipe calibrates none.

    Raises `QuantgateError` for a layer without them, one too many, and a scale that is no positive number.
    """
    present = {name for name in stored.names() if name.endswith((".k_scale", ".v_scale"))}
    wanted = {
        f"{layer_name(layer)}.self_attn.{part}": (layer, part)
        for layer in range(len(sizes.layers))
        for part in ("k_scale", "v_scale")
    }
    if not recipe.calibrate_kv_scales:
        if present:
            raise QuantgateError(
                f"{min(present)} is in the checkpoint, but the recipe calibrates no KV scales"
            )
        return {}
    missing, surplus = sorted(wanted.keys() - present), sorted(present - wanted.keys())
    if missing:
        raise QuantgateError(
            f"{len(missing)} of {len(wanted)} KV scales are missing; the first is {missing[0]}"
        )
    if surplus:
        raise QuantgateError(f"{surplus[0]} belongs to no layer of the architecture")
    found: dict[int, dict[str, float]] = {}
    for name, (layer, part) in wanted.items():
        tensor = stored.raw(name)
        if tensor.numel() != 1:
            raise QuantgateError(
                f"{name} has shape {list(tensor.shape)}; the engine's kernels take one scale per layer"
            )
        value = float(tensor)
        if not 0.0 < value < float("inf"):
            raise QuantgateError(f"{name} is {value}; a scale must be a positive number")
        found.setdefault(layer, {})[part] = value
    return {layer: LayerScales(pair["k_scale"], pair["v_scale"]) for layer, pair in found.items()}


class Coverage:
    """How much of the keys and values seen lies within the scales' ranges. Feed it with the caches of forward passes."""

    def __init__(self, scales: dict[int, LayerScales]) -> None:
        self._scales = scales
        self._largest: dict[tuple[int, str], float] = {}
        self._saturated: dict[tuple[int, str], int] = {}
        self._seen: dict[tuple[int, str], int] = {}

    def take(self, cache: Any) -> None:
        """One pass's cache (transformers 5: `layers[i].keys` and `.values`, after the rotary embedding, as engines store them)."""
        for layer, scales in self._scales.items():
            entry = cache.layers[layer]
            for part, tensor, scale in (("k", entry.keys, scales.key), ("v", entry.values, scales.value)):
                size, at = tensor.abs(), (layer, part)
                self._largest[at] = max(self._largest.get(at, 0.0), float(size.max()))
                beyond = int((size > FP8_MAX * scale).sum())
                self._saturated[at] = self._saturated.get(at, 0) + beyond
                self._seen[at] = self._seen.get(at, 0) + tensor.numel()

    def evidence(self) -> dict[str, Any]:
        """Figures for the record; raises `QuantgateError` for a scale that isn't plausible."""
        coverage, share = {}, {}
        for (layer, part), largest in self._largest.items():
            scales = self._scales[layer]
            name = f"{layer_name(layer)}.self_attn.{part}_scale"
            coverage[name] = FP8_MAX * (scales.key if part == "k" else scales.value) / max(largest, 1e-30)
            share[name] = self._saturated[(layer, part)] / self._seen[(layer, part)]
        low, high = PLAUSIBLE_COVERAGE
        for name, found in coverage.items():
            if not low <= found <= high:
                raise QuantgateError(
                    f"{name} covers {found:.2f} times the largest value on held-out text; {low} to {high} is plausible"
                )
        worst = max(share, key=lambda name: share[name])
        if share[worst] > MAX_SATURATED_SHARE:
            raise QuantgateError(
                f"{worst}: {share[worst]:.2%} of the values on held-out text saturate, at most {MAX_SATURATED_SHARE:.1%} may"
            )
        return {
            "kv_scales": {
                "layers": len(self._scales),
                "key": _range(scales.key for scales in self._scales.values()),
                "value": _range(scales.value for scales in self._scales.values()),
                "coverage": _range(coverage.values()),
                "saturated": {"scale": worst, "share": share[worst], "limit": MAX_SATURATED_SHARE},
                # What an FP8 cache at scale 1.0 would do to the same keys and values.
                "largest_key": max(self._largest[at] for at in self._largest if at[1] == "k"),
                "largest_value": max(self._largest[at] for at in self._largest if at[1] == "v"),
            }
        }


def _range(values: Any) -> list[float]:
    listed = list(values)
    return [float(f"{min(listed):.6g}"), float(f"{max(listed):.6g}")]
