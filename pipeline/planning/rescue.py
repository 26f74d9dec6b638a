"""What the rescue ladder asks of a profile: the planner's numbers, what device and quantizers can, which file to edit."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.capacity import Card, Geometry, WeightScheme, rank_weight_bytes
from pipeline.capacity.layers import Attention
from pipeline.capacity.levers import Planner, Setup
from pipeline.compatibility import (
    QUANTIZERS,
    Engine,
    Request,
    attention_refusals,
    quantizer_refusals,
    weight_refusals,
)
from pipeline.gpu import lowest_capability
from pipeline.planning.scenario import card_on, rules_of, scheme_of
from pipeline.results import Environment
from pipeline.settings import Settings, VariantSettings
from pipeline.verdict.ladder import MAKER, Way

FP8_WEIGHTS_FROM = 89
"""Compute capability with FP8 matrix units (vLLM 0.32 layers/quantization/fp8.py: get_min_capability says 75, by a slower kernel
that widens the weights; from 89 on the multiplication is FP8's own)."""


def ways_of(settings: Settings) -> dict[str, Way]:
    """How every variant of the profile is served."""
    return {name: way_of(settings, variant) for name, variant in settings.variants.items()}


def way_of(settings: Settings, variant: VariantSettings) -> Way:
    recipe = settings.quantizers.get(variant.weights)
    quantized = recipe if recipe is not None and recipe.quantizes_weights else None
    return Way(
        weights=variant.weights,
        bits=quantized.bits if quantized else 16,
        kv=variant.kv_cache_dtype,
        scales=variant.kv_scales,
        skipped=variant.skipped_layers,
        backend=quantized.backend if quantized else None,
        group_size=quantized.group_size if quantized else None,
        samples=quantized.samples if quantized and quantized.searches_weights else None,
        method=quantized.method if quantized else None,
    )


class ProfileOutlook:
    """`Outlook` over a profile. `counted`: weights scheme -> bytes of the checkpoint at hand; others are computed."""

    def __init__(
        self, settings: Settings, geometry: Geometry, machine: Environment, counted: Mapping[str, int]
    ) -> None:
        self._settings, self._geometry, self._counted = settings, geometry, counted
        self._rules = rules_of(settings)
        server, device = settings.server, settings.device
        capability = lowest_capability(machine.gpus)
        self._engine = Engine(
            server.engine_version,
            device.kind,
            capability if device.kind == "cuda" else None,
            machine.cpu_flags,
            server.tensor_parallel,
        )
        self.required = settings.policy.required_sequences
        self.max_model_len = server.max_model_len
        self.layers = len(geometry.layers)
        self.backends: Sequence[str] = tuple(QUANTIZERS)
        self.fp8_weights = device.kind == "cuda" and (capability or 0) >= FP8_WEIGHTS_FROM

    def _card_on(self, kv_cache_dtype: str, cards: int) -> Card:
        return card_on(self._settings, kv_cache_dtype, cards, self._geometry)

    def sequences(self, way: Way, max_model_len: int) -> int | None:
        if self._settings.server.pipeline_parallel > 1:
            return None
        return self._planner(way).sequences(self._setup(way, max_model_len))

    def longest(self, way: Way) -> int | None:
        if self._settings.server.pipeline_parallel > 1:
            return None
        return self._planner(way).longest(self._setup(way, self.max_model_len), self.required)

    def refusal(self, way: Way) -> str | None:
        found = []
        for head in {
            layer.mixer.head_dim for layer in self._geometry.layers if isinstance(layer.mixer, Attention)
        }:
            found += attention_refusals(way.kv, self._engine, head)
        if way.skipped and self._engine.kind != "cuda":
            return "layers are left at 16 bits where block sizes are aligned to them, which a CPU's platform doesn't do"
        if way.scales == "checkpoint" and way.backend not in (None, MAKER):
            return f"{way.backend} calibrates no KV scales"
        maker = MAKER if way.scales == "checkpoint" else way.backend
        if maker is not None:
            size, method = (way.group_size if way.bits < 16 else None), way.method or "awq"
            ranks = self._settings.server.tensor_parallel
            found += quantizer_refusals(self._geometry, Request(maker, size, ranks, method))
            if way.bits < 16 and not found:
                form = QUANTIZERS[maker].formats[method]
                found += weight_refusals(self._geometry, self._engine, form, size)
        return str(found[0]) if found else None

    def command(self, way: Way, failed: str, max_model_len: int) -> str | None:
        settings = self._settings
        now = way_of(settings, settings.variants[failed])
        if max_model_len != self.max_model_len:
            server, load = (f"conf/{group}/{settings.choices[group]}.yaml" for group in ("server", "load"))
            return _run({server: {"max_model_len": str(max_model_len)}, load: self._cut(max_model_len)})
        if way.skipped - now.skipped:
            name = self._unskipped(way, failed)
            if name is None:
                return self._edit(way)
            args = settings.variants[name].engine_args
            key = "engine_args" if args else "+engine_args"
            return _run({f"conf/variant/{name}.yaml": {key: _listed([*args, *_skip(way.skipped)])}})
        if now.scales == "checkpoint" and way.scales is None:
            return self._edit(replace(way, weights=self._without_scales(way)))
        if way.weights == now.weights and way.skipped == now.skipped:
            scales = {"kv_scales": "null"} if now.scales else {}
            return _run({f"conf/variant/{failed}.yaml": {"kv_cache_dtype": way.kv, **scales}})
        recipe = settings.quantizers.get(settings.variants[failed].weights)
        if recipe is not None and (way.bits, way.backend, way.method) == (now.bits, now.backend, now.method):
            file = f"conf/quantizer/{recipe.name}.yaml"
            if way.group_size != now.group_size:
                return _run({file: {"group_size": str(way.group_size)}})
            return _run({file: {"samples": str(way.samples)}})
        return self._edit(way)

    def _cut(self, max_model_len: int) -> dict[str, str]:
        """Overrides of the load's file that keep its requests within a shorter length."""
        workload = self._settings.load.workload
        longest = workload.longest_tokens
        if longest is None or longest <= max_model_len or workload.kind == "prompts":
            return {}
        key = "input_max_tokens" if workload.kind == "lognormal" else "input_tokens"
        kept = longest - getattr(workload, key)
        return {f"workload.{key}": str(max(1, max_model_len - kept))}

    def _edit(self, way: Way) -> str:
        """What to add to the profile; by name where conf/ has it."""
        way = replace(way, weights=way.weights or self._made(way))
        scheme, quantizer, variant = self._ready(way)
        scheme = scheme or quantizer  # no variant of conf/ names one: the recipe's own name will do
        if quantizer:
            making = f"`{scheme}: {quantizer}` to quantizer_names"
        else:
            making = f"a scheme with {_keys(_recipe(way))} to quantizer_names"
        parts = [] if way.weights else [making]
        of = {"weights": way.weights or scheme or "that scheme", "kv_cache_dtype": way.kv}
        of |= {"kv_scales": way.scales} if way.scales else {}
        skip = {"engine_args": _listed(_skip(way.skipped))} if way.skipped else {}
        parts.append(
            f"`{variant}` to variant_names"
            if variant
            else f"a variant with {_keys(of | skip)} to variant_names"
        )
        name = self._settings.profile
        flags = f", and `{_keys(skip)}` in conf/variant/{variant}.yaml" if variant and skip else ""
        return f"add {' and '.join(parts)} in conf/profile/{name}.yaml{flags}; then `quantgate use {name}` and `dvc repro`"

    def _ready(self, way: Way) -> tuple[str | None, str | None, str | None]:
        """(scheme, quantizer, variant) of conf/ that make `way` but for its skipped layers, None for what isn't there.

        A scheme's name says little of its recipe; in conf/ it begins with the method's, and with bf16 where the weights stay.
        """
        recipe = _recipe(way)
        quantizer = next(
            (
                path.stem
                for path, content in _options("quantizer")
                if {"method": "awq", "bits": 4, "calibrate_kv_scales": False, **content}.items()
                >= recipe.items()
            ),
            None,
        )
        taken = {"bf16", *self._settings.quantizers}
        for path, content in _options("variant"):
            scheme = str(content.get("weights"))
            same = (content.get("kv_cache_dtype"), content.get("kv_scales")) == (way.kv, way.scales)
            free = (
                scheme not in taken
                and scheme.startswith("bf16" if way.bits == 16 else way.method or "awq")
                and quantizer is not None
            )
            makes = scheme == way.weights if way.weights else free
            if same and makes and not content.get("engine_args"):
                return scheme, quantizer, path.stem
        return None, quantizer, None

    def _unskipped(self, way: Way, failed: str) -> str | None:
        """The profile's variant that is `way` but for the skipped layers; the failed one where it is."""
        ways = ways_of(self._settings)
        for name in (failed, *ways):
            other = ways[name]
            if (other.kv, other.scales, other.bits) == (way.kv, way.scales, way.bits) and not other.skipped:
                return name
        return None

    def _made(self, way: Way) -> str | None:
        """The profile's scheme that makes a way's weights."""
        for name, recipe in self._settings.quantizers.items():
            if all(getattr(recipe, key) == value for key, value in _recipe(way).items()):
                return name
        return None

    def _without_scales(self, way: Way) -> str | None:
        """The profile's scheme of as many bits without KV scales: a checkpoint that has some goes with no other cache."""
        if way.bits == 16:
            return "bf16"
        for name, recipe in self._settings.quantizers.items():
            same = (recipe.bits, recipe.method) == (way.bits, way.method)
            if same and not recipe.calibrate_kv_scales:
                return name
        return None

    def _planner(self, way: Way) -> Planner:
        return Planner(
            self._geometry,
            {"": lambda cards: self._bytes(way, cards)},
            lambda dtype, cards: card_on(self._settings, dtype, cards),
            self._rules,
        )

    def _setup(self, way: Way, max_model_len: int) -> Setup:
        settings = self._settings
        utilization, cards = settings.device.memory_utilization, settings.server.tensor_parallel
        return Setup("", way.kv, max_model_len, utilization, cards, way.skipped)

    def _bytes(self, way: Way, cards: int) -> int:
        if way.weights is not None:
            if way.weights in self._counted and cards == 1:
                return self._counted[way.weights]
            return rank_weight_bytes(self._geometry, scheme_of(self._settings, way.weights), cards)[0]
        scales = way.scales == "checkpoint"
        if way.bits == 16:
            scheme = WeightScheme("none", kv_scales=scales)
        else:
            maker, method = (MAKER if scales else way.backend or "autoawq"), way.method or "awq"
            form = QUANTIZERS[maker].formats[method]
            scheme = WeightScheme(form, way.bits, way.group_size, method != "fp8", scales)
        return rank_weight_bytes(self._geometry, scheme, cards)[0]


def _recipe(way: Way) -> dict[str, Any]:
    """Keys of the quantizer that makes a way's weights."""
    scales = way.scales == "checkpoint"
    recipe = {
        "backend": MAKER if scales else way.backend,
        "bits": way.bits,
        "group_size": way.group_size,
        "calibrate_kv_scales": scales,
    }
    if way.method in (None, "awq"):
        return recipe
    return (
        recipe
        | {"method": way.method, "clip_search": False}
        | ({"zero_point": False} if way.method == "fp8" else {})
    )


def _skip(layers: Iterable[int]) -> list[str]:
    return ["--kv-cache-dtype-skip-layers", *map(str, sorted(layers))]


def _listed(words: Iterable[str]) -> str:
    """A list for YAML and for Hydra; digits stay text by their quotes."""
    return f"[{','.join(word if re.fullmatch('--[a-z-]+', word) else json.dumps(word) for word in words)}]"


def _keys(values: Mapping[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return ", ".join(f"{key}: {text}" for key, text in texts.items())


def _run(values: Mapping[str, Mapping[str, str]]) -> str:
    words = [f"-S '{file}:{key}={value}'" for file, keys in values.items() for key, value in keys.items()]
    return f"dvc exp run {' '.join(words)}"


def _options(group: str) -> list[tuple[Path, dict[str, Any]]]:
    """The files of a conf group as they stand; one that can't be read is left to whoever chooses it."""
    import yaml

    found = []
    for path in sorted(Path("conf", group).glob("*.yaml")):
        with contextlib.suppress(OSError, yaml.YAMLError):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                found.append((path, content))
    return found
