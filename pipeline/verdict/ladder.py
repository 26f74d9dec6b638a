"""What to try next where a variant loses quality: the rungs in order, each with its reason and what the planner says of it.

Pure: the planner, the compatibility tables and the conf files are behind `Outlook`. Order of the KV cache's rungs: what costs
nothing first (scales that fit the model), then what costs a few per cent of the room, then what costs half of it. Order of the
weights' rungs: another search for the same format, then more bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pipeline.results import Decision, Rung, VariantVerdict

SIXTEEN_BIT = ("bfloat16", "float16")
PER_TOKEN_HEAD = "fp8_per_token_head"
OUTER_LAYERS = 2
"""Layers at either end that keep 16 bits, as many as vLLM's own TurboQuant keeps (pipeline/capacity/kv.py)."""
SMALLER_GROUPS = (64, 32)
MAKER = "llmcompressor"
"""Of what only one backend makes: GPTQ, FP8 weights, KV scales."""
CALIBRATION_FACTOR = 2
"""A smaller step would hardly be told from noise."""


@dataclass(frozen=True)
class Way:
    """How a variant is served, as far as its quality depends on it.

    `weights`: its scheme in the profile, None for one that the profile doesn't make. `backend`: who quantized them, `method`: how.
    """

    weights: str | None
    bits: int
    kv: str
    scales: Literal["one", "checkpoint"] | None = None
    skipped: frozenset[int] = frozenset()
    backend: str | None = None
    group_size: int | None = None
    samples: int | None = None
    method: Literal["awq", "gptq", "fp8"] | None = None

    @property
    def quantized_kv(self) -> bool:
        return self.kv not in SIXTEEN_BIT


@dataclass(frozen=True)
class Known:
    """A variant of the profile: `decision` is its verdict's, `quality` that of its quality gates alone."""

    name: str
    way: Way
    decision: Decision
    quality: Decision


class Outlook(Protocol):
    """What else must be known of a way to serve."""

    required: int
    max_model_len: int
    layers: int
    backends: Sequence[str]
    fp8_weights: bool
    """Whether the engine has 8-bit float weights on this device."""

    def sequences(self, way: Way, max_model_len: int) -> int | None:
        """Whole sequences that fit, None where that can't be computed."""

    def longest(self, way: Way) -> int | None:
        """The largest length at which the required sequences fit."""

    def refusal(self, way: Way) -> str | None:
        """Why device, engine or quantizer can't do it, None where they can."""

    def command(self, way: Way, failed: str, max_model_len: int) -> str | None:
        """What a person types or edits to try it."""


@dataclass(frozen=True)
class _Step:
    change: str
    why: str
    way: Way
    shorter: bool = False


def quality_decision(verdict: VariantVerdict) -> Decision:
    """The conjunction of the gates that speak of quality."""
    found = {
        gate.decision
        for gate in verdict.gates
        if gate.gating and gate.name.startswith(("quality", "divergence"))
    }
    if "NO-GO" in found:
        return "NO-GO"
    return "GO" if found == {"GO"} else "INCONCLUSIVE"


def with_ladders(
    variants: Mapping[str, VariantVerdict], ways: Mapping[str, Way], outlook: Outlook
) -> dict[str, VariantVerdict]:
    """The verdicts, each that is NO-GO on quality with its ladder."""
    known = [
        Known(name, ways[name], verdict.decision, quality_decision(verdict))
        for name, verdict in variants.items()
    ]
    return {
        one.name: variants[one.name].model_copy(update={"rescue": ladder(one, known, outlook)})
        if one.quality == "NO-GO"
        else variants[one.name]
        for one in known
    }


def ladder(failed: Known, known: Sequence[Known], outlook: Outlook) -> list[Rung]:
    """The rungs worth trying after `failed`, in order. What can't be done here isn't among them."""
    steps: list[_Step] = []
    for part in blamed(failed, known):
        steps += _kv_steps(failed.way, outlook) if part == "kv" else _weight_steps(failed.way, outlook)
    rungs = []
    for step in steps:
        if outlook.refusal(step.way) is not None:
            continue
        rung = _rung(step, failed, known, outlook)
        if rung is not None and rung.variant != failed.name:
            rungs.append(rung)
    return rungs


def blamed(failed: Known, known: Sequence[Known]) -> list[Literal["kv", "weights"]]:
    """Which quantization is at fault: told by the variant with the same weights and a 16-bit cache, where there is one."""
    way = failed.way
    if not way.quantized_kv:
        return ["weights"] if way.bits < 16 else []
    if way.bits == 16:
        return ["kv"]
    siblings = [
        one
        for one in known
        if one.way.bits == way.bits and not one.way.quantized_kv and one.way.weights == way.weights
    ] or [one for one in known if one.way.bits == way.bits and not one.way.quantized_kv]
    if not siblings:
        return ["kv", "weights"]
    return ["weights", "kv"] if siblings[0].quality == "NO-GO" else ["kv"]


def _kv_steps(way: Way, outlook: Outlook) -> list[_Step]:
    outer = min(OUTER_LAYERS, outlook.layers // 2)
    ends = frozenset([*range(outer), *range(outlook.layers - outer, outlook.layers)])
    plain = replace(way, skipped=frozenset())
    # Whoever calibrates the scales makes the weights too, so those needn't be the failed one's.
    calibrated = replace(plain, weights=None, kv="fp8", scales="checkpoint", backend=None, samples=None)
    per_token = replace(plain, kv=PER_TOKEN_HEAD, scales=None)
    steps = [
        _Step(
            "FP8 KV at calibrated scales",
            "at scale 1.0 keys and values beyond 448 saturate; scales from calibration text put them within the format",
            calibrated,
        ),
        _Step(
            "FP8 KV with a scale per token and head",
            "one scale per layer can't fit every token; these are found as the cache is written, for a few per cent more room",
            per_token,
        ),
        _Step(
            f"first and last {outer} layers' KV at 16 bits",
            "the outer layers are the likeliest to have values that eight bits lose",
            replace(plain if plain.kv == PER_TOKEN_HEAD else calibrated, skipped=ends),
        ),
        _Step(
            "BF16 KV",
            "no loss in the cache at all",
            replace(plain, kv="bfloat16", scales=None),
            shorter=True,
        ),
    ]
    return steps[_place(way) :]


def _place(way: Way) -> int:
    """The first rung above a way."""
    if way.skipped:
        return 3
    if way.kv.endswith("per_token_head"):
        return 2
    return 1 if way.scales == "checkpoint" else 0


def _weight_steps(way: Way, outlook: Outlook) -> list[_Step]:
    if way.method == "fp8":
        return [_sixteen_bits(way)]
    steps = [
        _Step(
            f"the same format by {other}",
            "its search for scales and its calibration differ",
            replace(way, weights=None, backend=other, samples=None),
        )
        for other in outlook.backends
        if other != way.backend and way.method == "awq"
    ]
    if way.method == "awq":
        steps.append(
            _Step(
                "4 bits by GPTQ",
                "it makes up for each weight's rounding error in those not yet rounded, where AWQ scales and cuts before rounding",
                replace(way, weights=None, backend=MAKER, samples=None, method="gptq"),
            )
        )
    for size in SMALLER_GROUPS:
        if way.group_size is not None and size < way.group_size:
            why = f"a scale for every {size} input channels instead of {way.group_size}; a little more room for weights"
            steps.append(_Step(f"group size {size}", why, replace(way, weights=None, group_size=size)))
    if way.samples is not None:
        more = way.samples * CALIBRATION_FACTOR
        steps.append(
            _Step(
                f"{more} calibration sequences instead of {way.samples}",
                "scales are searched on more text, at the price of time",
                replace(way, weights=None, samples=more),
            )
        )
    if outlook.fp8_weights:
        steps.append(
            _Step(
                "FP8 weights (W8A8)",
                "twice the bits, and activations rounded to 8 bits beside them: plain rounding, nothing to calibrate",
                Way(None, 8, way.kv, way.scales, way.skipped, backend=MAKER, method="fp8"),
            )
        )
    return [*steps, _sixteen_bits(way)]


def _sixteen_bits(way: Way) -> _Step:
    # Calibrated scales make a checkpoint of their own.
    weights = None if way.scales == "checkpoint" else "bf16"
    return _Step(
        "BF16 weights", "no loss in the weights at all", Way(weights, 16, way.kv, way.scales, way.skipped)
    )


def _rung(step: _Step, failed: Known, known: Sequence[Known], outlook: Outlook) -> Rung | None:
    length, change, why = outlook.max_model_len, step.change, step.why
    fits = outlook.sequences(step.way, length)
    if step.shorter and fits is not None and fits < outlook.required:
        shorter = outlook.longest(step.way)
        if shorter is None:
            return None
        length, fits = shorter, outlook.sequences(step.way, shorter)
        change, why = f"{change} at a shorter max_model_len", f"{why}; longer requests are refused"
    # A variant of the profile does it, unless it has another length than the profile's.
    found = _same(step.way, known) if length == outlook.max_model_len else None
    return Rung(
        change=change,
        why=why,
        variant=found.name if found else None,
        decision=found.decision if found else None,
        sequences=fits,
        max_model_len=length,
        enough=None if fits is None else fits >= outlook.required,
        command=None if found else outlook.command(step.way, failed.name, length),
    )


def _same(way: Way, known: Sequence[Known]) -> Known | None:
    """The profile's variant that is served like `way`; of its weights, the same scheme is preferred."""
    fitting = [
        one
        for one in known
        if (one.way.kv, one.way.scales, one.way.skipped, one.way.bits)
        == (way.kv, way.scales, way.skipped, way.bits)
        and way.method in (None, one.way.method)
    ]
    if way.weights is not None or way.scales == "checkpoint":
        own = [one for one in fitting if one.way.weights == way.weights]
        return next(iter([*own, *fitting]), None)
    wanted = (way.backend, way.group_size, way.samples)
    return next(
        (
            one
            for one in fitting
            if all(
                a is None or a == b
                for a, b in zip(wanted, (one.way.backend, one.way.group_size, one.way.samples))
            )
        ),
        None,
    )
