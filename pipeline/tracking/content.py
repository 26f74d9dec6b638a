"""What goes into the runs: parameters, metrics and tags as plain values, without mlflow.

The names are flat and the same in every run, so that the comparison page lines them up. What was not measured is left
out: MLflow has no missing value, and a zero would be a lie. Parameters that tell runs apart are in every run, because a
filter on a parameter drops the runs that don't have it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.quality.statistics import flipped
from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import control_summary, fitting_sequences, headline, warnings, why
from pipeline.report.sections.flips import score_lead
from pipeline.results import Distribution, KvScales, LoadLevel, Phase, Quality, Quantization, VariantVerdict
from pipeline.tracking.cards import card_figures, card_tags

MAX_PARAM_CHARACTERS = 6000  # mlflow 3.17 utils/validation.py, MAX_PARAM_VAL_LENGTH
MAX_TAG_CHARACTERS = 8000  # the same file, MAX_TAG_VAL_LENGTH


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric. `step` is the concurrency for load levels, 0 for figures of the whole run."""

    key: str
    value: float
    step: int = 0


@dataclass(frozen=True)
class RunContent:
    """Everything about one run but its files."""

    name: str
    params: Mapping[str, str]
    metrics: tuple[MetricPoint, ...]
    tags: Mapping[str, str]


def variant_content(bundle: ResultBundle, variant: str) -> RunContent:
    """The run of one variant."""
    result = bundle.verdict.variants[variant]
    tags = {
        "kind": "variant",
        "variant": variant,
        "decision": result.decision,
        "emulated": _emulated(bundle, result),
        "mlflow.note.content": f"**{result.decision}**. {why(result)}",
        **{f"gate.{_key(gate.name)}": gate.decision for gate in result.gates if gate.gating},
    }
    return RunContent(
        variant,
        _variant_params(bundle, variant),
        tuple(_variant_metrics(bundle, variant)),
        _common_tags(bundle, {**tags, **card_tags(result.provenance)}),
    )


def comparison_content(bundle: ResultBundle, name: str) -> RunContent:
    """The run above the variants."""
    variants = bundle.verdict.variants
    decisions = [result.decision for result in variants.values()]
    passed = [variant for variant, result in variants.items() if result.decision == "GO"]
    counts = {
        "variants_go": decisions.count("GO"),
        "variants_no_go": decisions.count("NO-GO"),
        "variants_inconclusive": decisions.count("INCONCLUSIVE"),
        "required_sequences": bundle.plan.required_sequences,
    }
    tags = {
        "kind": "comparison",
        "decision": f"GO: {', '.join(passed)}" if passed else "no GO",
        "emulated": "memory budget" if bundle.plan.device_emulated else "none",
        "mlflow.note.content": _note(bundle),
    }
    params = {**_common_params(bundle), "variants": ", ".join(bundle.variants)}
    return RunContent(name, _cut(params), tuple(_points(counts)), _common_tags(bundle, tags))


def verdict_columns(bundle: ResultBundle) -> dict[str, list[Any]]:
    """The verdict table, column by column, with None for what was not measured."""
    rows = []
    for variant in bundle.variants:
        result = bundle.verdict.variants[variant]
        delta, throughput = result.quality, result.throughput
        rows.append(
            {
                "variant": variant,
                "decision": result.decision,
                "fitting_sequences": fitting_sequences(result.capacity),
                "required_sequences": bundle.plan.required_sequences,
                "quality_delta": delta.delta if delta else None,
                "quality_delta_lo": delta.delta_ci[0] if delta and delta.delta_ci else None,
                "quality_delta_hi": delta.delta_ci[1] if delta and delta.delta_ci else None,
                "flips": delta.flips if delta else None,
                "noise_floor_flips": delta.noise_floor_flips if delta else None,
                "items_to_decide": delta.items_to_decide if delta else None,
                "kl": result.divergence.kl.value if result.divergence else None,
                "same_top1": result.divergence.same_top1.value if result.divergence else None,
                "peak_output_tok_s": throughput.peak_output_tok_s if throughput else None,
                "why": why(result),
            }
        )
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def proof_columns(bundle: ResultBundle) -> dict[str, list[Any]]:
    """The proofs of all weights schemes side by side, column by column; empty where nothing was quantized."""
    rows = [
        {
            "scheme": scheme,
            "backend": record.backend,
            "format": record.format,
            "bits": record.bits,
            "group_size": record.group_size,
            "worst_layer": record.effective_error.worst_layer.layer,
            "worst_module": record.effective_error.worst.module,
            "original_perplexity": record.perplexity.original,
            "calibration_sha256": _read(record, "sha256"),
            "weight_bytes": record.weight_bytes,
            **_quantization_figures(bundle, scheme),
        }
        for scheme, record in bundle.quantizations.items()
    ]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def gate_columns(result: VariantVerdict) -> dict[str, list[Any]]:
    """A variant's gates, column by column."""
    keys = ("name", "decision", "value", "limit", "unit", "gating", "why")
    return {key: [getattr(gate, key) for gate in result.gates] for key in keys}


def flip_columns(bundle: ResultBundle, variant: str) -> dict[str, list[Any]]:
    """Every item that a variant answers differently from the reference, column by column; empty where there is none."""
    base, own = bundle.qualities.get(bundle.verdict.reference), bundle.qualities.get(variant)
    if base is None or own is None or bundle.verdict.variants[variant].quality is None:
        return {}
    rows = [
        {
            "item": first.id,
            "slice": first.slice,
            "change": "gained" if second.correct else "lost",
            "prompt": first.prompt,
            "right_answer": first.expected,
            "reference_answer": first.answer,
            "variant_answer": second.answer,
            "reference_lead_nats": score_lead(first),
            "variant_lead_nats": score_lead(second),
            "reference_scores": json.dumps(first.loglikelihoods),
            "variant_scores": json.dumps(second.loglikelihoods),
        }
        for first, second in flipped(base.samples, own.samples)
    ]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _common_params(bundle: ResultBundle) -> dict[str, Any]:
    """What identifies the scenario."""
    plan, verdict = bundle.plan, bundle.verdict
    engines = {
        f"{result.provenance.engine} {result.provenance.engine_version}"
        for result in verdict.variants.values()
        if result.provenance
    }
    shared = {
        "profile": verdict.profile,
        "model": plan.model,
        "device": plan.device,
        "device_emulated": str(plan.device_emulated).lower(),
        "device_memory_bytes": plan.device_memory_bytes,
        "memory_utilization": plan.memory_utilization,
        "required_sequences": plan.required_sequences,
        "reference": verdict.reference,
        "control": verdict.control,
        "engine": ", ".join(sorted(engines)) or None,
        "cpu_model": bundle.environment.cpu_model,
    }
    settings = {
        f"{group}.{key}": value
        for group, values in bundle.facts.items()
        if isinstance(values, Mapping) and group != "variants"
        for key, value in values.items()
    }
    return {**shared, **settings}


def _variant_params(bundle: ResultBundle, variant: str) -> dict[str, str]:
    row = next((row for row in bundle.plan.rows if row.variant == variant), None)
    origin = bundle.verdict.variants[variant].provenance
    params = {**_common_params(bundle), "variant": variant}
    if row is not None:
        params |= {
            "weights": row.weights,
            "kv_cache_dtype": row.kv_cache_dtype,
            "max_model_len": row.capacity.max_model_len,
            "block_size": row.capacity.block_size,
        }
        quantized = bundle.quantizations.get(row.weights)
        if quantized is not None:
            params |= {f"quantizer.{key}": value for key, value in quantized.recipe.items()}
            params |= {
                "quantizer.format": quantized.format,
                "quantizer.calibration_sha256": _read(quantized, "sha256"),
                "quantizer.chat_template": _read(quantized, "chat_template"),
            }
    if origin is not None:
        params |= {
            "attention_backend": origin.attention_backend,
            "weights_kernel": origin.weights_kernel,
            "kv_scales": origin.kv_scales,
            "emulated_parts": ", ".join(origin.emulated) or "none",
            **{
                f"kernel.{part}": f"{choice.taken}, by {choice.why}"
                for part, choice in origin.kernels.items()
            },
        }
    return _cut(params)


def _cut(params: Mapping[str, Any]) -> dict[str, str]:
    """Values as text, None left out, nothing longer than MLflow takes."""
    return {
        _key(key): str(value)[:MAX_PARAM_CHARACTERS] for key, value in params.items() if value is not None
    }


def _variant_metrics(bundle: ResultBundle, variant: str) -> Iterable[MetricPoint]:
    result = bundle.verdict.variants[variant]
    measured, quality = bundle.measurements.get(variant), bundle.qualities.get(variant)
    row = next((row for row in bundle.plan.rows if row.variant == variant), None)
    yield from _points(_capacity_figures(result))
    yield from _points(_quality_figures(result, quality))
    yield from _points(_divergence_figures(result))
    yield from _points(card_figures(result.provenance))
    if row is not None:
        yield from _points({"weight_bytes": row.weight_bytes, **_quantization_figures(bundle, row.weights)})
        if row.weights in bundle.quantizations:
            errors = bundle.quantizations[row.weights].effective_error.per_layer
            yield from (
                MetricPoint("proof/effective_error_by_layer", error, layer)
                for layer, error in enumerate(errors)
            )
    if result.throughput is not None:
        yield from _points(
            {
                "peak_output_tok_s": result.throughput.peak_output_tok_s,
                "peak_output_ratio_to_reference": result.throughput.ratio_to_reference,
            }
        )
    if measured is not None:
        yield from _points({"startup_s": measured.startup_s, "measure_wall_s": measured.wall_s})
        yield from _points(_phase_figures("measure", measured.phases))
        for search in measured.searches:
            kind = "streams" if search.mode == "closed" else "rate"
            yield from _points({f"slo_{kind}_low": search.low, f"slo_{kind}_high": search.high})
        for level in measured.levels:
            figures = _level_figures(level)
            yield from _points(
                {f"load/{key}": value for key, value in figures.items()}, step=level.concurrency
            )
            yield from _points({f"{key}_at_{level.concurrency}": figures[key] for key in COMPARED_AT_LEVEL})


def _phase_figures(stage: str, phases: Iterable[Phase]) -> dict[str, float | None]:
    return {f"time/{stage}_{phase.name.replace(' ', '_')}_s": phase.seconds for phase in phases}


def _capacity_figures(result: VariantVerdict) -> dict[str, float | None]:
    found = result.capacity
    if found is None:
        return {}
    return {
        "kappa_bytes": found.kappa_bytes,
        "kv_budget_bytes": found.kv_budget_bytes,
        "capacity_predicted_tokens": found.predicted_tokens,
        "capacity_reported_tokens": found.reported_tokens,
        "capacity_predicted_fitting_sequences": found.predicted_fitting_sequences,
        "capacity_fitting_sequences": fitting_sequences(found),
        "observed_peak_running": found.observed_peak_running,
    }


def _quality_figures(result: VariantVerdict, quality: Quality | None) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if quality is not None:
        figures |= {
            "quality_accuracy": quality.accuracy,
            "quality_items": quality.n,
            "quality_wall_s": quality.wall_s,
        }
        figures |= _phase_figures("quality", quality.phases)
        figures |= {f"slice/{label}_accuracy": score.accuracy for label, score in quality.slices.items()}
    delta = result.quality
    if delta is not None:
        low, high = delta.delta_ci or (None, None)
        figures |= {
            "quality_delta": delta.delta,
            "quality_delta_lo": low,
            "quality_delta_hi": high,
            "flips": delta.flips,
            "flips_lost": delta.flips_lost,
            "flips_gained": delta.flips_gained,
            "changed_answers": delta.changed_answers,
            "noise_floor_flips": delta.noise_floor_flips,
            "mcnemar_p": delta.mcnemar_p,
            "items_to_decide": delta.items_to_decide,
            "smallest_margin": delta.smallest_margin,
        }
        figures |= {f"slice/{label}_delta": found.get("delta") for label, found in delta.slices.items()}
    return figures


def _divergence_figures(result: VariantVerdict) -> dict[str, float | None]:
    found = result.divergence
    figures: dict[str, float | None] = {}
    if found is not None:
        named = {
            "perplexity_ratio": found.perplexity_ratio,
            "kl": found.kl,
            "same_top1": found.same_top1,
            "delta_p_rms": found.delta_p_rms,
        }
        for key, estimate in named.items():
            figures |= {f"divergence/{key}": estimate.value, f"divergence/{key}_se": estimate.se}
        figures["divergence/kl_tail_mass"] = found.kl_tail_mass
    for task, delta in result.further.items():
        figures |= {f"task/{task}_delta": delta.delta, f"task/{task}_accuracy": delta.accuracy}
    for task, ratio in result.perplexity_ratios.items():
        figures[f"task/{task}_perplexity_ratio"] = ratio.value
    return figures


def _read(record: Quantization, key: str) -> Any:
    """A fact of the text that a scheme was calibrated on, of its weights or else its KV scales; None where neither read any."""
    used = record.calibration or record.kv_calibration
    return None if used is None else getattr(used, key)


def _quantization_figures(bundle: ResultBundle, scheme: str) -> dict[str, float | None]:
    record = bundle.quantizations.get(scheme)
    if record is None:
        return {}
    perplexity, error = record.perplexity, record.effective_error
    return {
        "perplexity_ratio": perplexity.ratio,
        "perplexity_quantized": perplexity.quantized,
        "proof/round_to_nearest_ratio": perplexity.round_to_nearest,
        "proof/share_of_rounding_loss": perplexity.share_of_rounding_loss,
        "effective_error_mean": error.mean,
        "proof/effective_error_worst_layer": error.worst_layer.value,
        "proof/effective_error_worst_module": error.worst.value,
        "proof/quantized_modules": record.quantized_modules.found,
        "proof/unquantized_modules": len(record.unquantized_modules),
        "proof/nan_inf_values": record.nan_inf.found,
        "proof/nan_inf_tensors_scanned": record.nan_inf.tensors_scanned,
        **_kv_scale_figures(record.kv_scales),
        "proof/predicted_weight_bytes": record.predicted_weight_bytes,
        "proof/calibration_tokens": record.calibration and record.calibration.effective_tokens,
        "proof/kv_calibration_tokens": record.kv_calibration and record.kv_calibration.effective_tokens,
        "quantize_wall_s": record.wall_s,
        "proof/peak_memory_bytes": record.peak_memory_bytes,
        "proof/peak_device_memory_bytes": record.peak_device_memory_bytes,
    }


def _kv_scale_figures(found: KvScales | None) -> dict[str, float | None]:
    """The same keys without scales, so that schemes stand side by side."""
    none = (None, None)
    (key_min, key_max), (value_min, value_max), (coverage_min, coverage_max) = (
        (found.key, found.value, found.coverage) if found else (none, none, none)
    )
    return {
        "proof/kv_scale_layers": found.layers if found else None,
        "proof/kv_key_scale_min": key_min,
        "proof/kv_key_scale_max": key_max,
        "proof/kv_value_scale_min": value_min,
        "proof/kv_value_scale_max": value_max,
        "proof/kv_coverage_min": coverage_min,
        "proof/kv_coverage_max": coverage_max,
        "proof/kv_saturated_share": found.saturated.share if found else None,
        "proof/kv_largest_key": found.largest_key if found else None,
        "proof/kv_largest_value": found.largest_value if found else None,
    }


COMPARED_AT_LEVEL = ("output_tok_s", "ttft_p50_ms", "tpot_p50_ms")
"""Figures that are also logged under a name of their own per level: the table of runs shows no curves."""


def _level_figures(level: LoadLevel) -> dict[str, float | None]:
    def both(name: str, found: Distribution) -> dict[str, float | None]:
        return {
            f"{name}_p50_ms": found.p50_ms,
            f"{name}_p90_ms": found.p90_ms,
            f"{name}_p99_ms": found.p99_ms,
        }

    return {
        "output_tok_s": level.output_throughput_tok_s,
        "steady_output_tok_s": level.steady.output_throughput_tok_s if level.steady else None,
        "goodput_rps": level.goodput_rps,
        **both("ttft", level.ttft),
        **both("tpot", level.tpot),
        **both("itl", level.itl),
        **both("e2el", level.e2el),
        "peak_running": level.peak_running,
        "peak_waiting": level.peak_waiting,
        "peak_kv_usage": level.peak_kv_usage,
        "preemptions": level.preemptions,
        "failed_requests": level.failed,
        "prefix_cache_hit_rate": level.prefix_cache_hit_rate,
    }


def _points(figures: Mapping[str, float | None], step: int = 0) -> Iterable[MetricPoint]:
    """The figures that exist, as points."""
    for key, value in figures.items():
        if value is not None and math.isfinite(value):
            yield MetricPoint(_key(key), float(value), step)


def _common_tags(bundle: ResultBundle, tags: Mapping[str, str]) -> dict[str, str]:
    shared = {
        "profile": bundle.verdict.profile,
        "reference": bundle.verdict.reference,
        "model": bundle.plan.model,
        "mlflow.source.name": "dvc repro",
        "mlflow.source.type": "LOCAL",
    }
    return {key: str(value)[:MAX_TAG_CHARACTERS] for key, value in {**shared, **tags}.items()}


def _emulated(bundle: ResultBundle, result: VariantVerdict) -> str:
    """What wasn't real hardware, or "none"."""
    parts = ["memory budget"] if bundle.plan.device_emulated else []
    parts += result.provenance.emulated if result.provenance else []
    return ", ".join(parts) or "none"


def _note(bundle: ResultBundle) -> str:
    """The comparison run's description: the answer, the caveats, and one line per variant."""
    lines = [f"**{headline(bundle.verdict)}.** {control_summary(bundle.verdict)}", ""]
    lines += [f"> **{title}.** {text}\n" for title, text in warnings(bundle)]
    for variant in bundle.variants:
        result = bundle.verdict.variants[variant]
        lines.append(f"- `{variant}`: **{result.decision}**. {why(result)}")
    lines += ["", "The whole report is the artifact `report.html`."]
    return "\n".join(lines)


def _key(text: str) -> str:
    """A name that MLflow takes: letters, digits, `_ - . /` and blanks (mlflow 3.17 utils/validation.py)."""
    return re.sub(r"[^A-Za-z0-9_\-./ ]", "_", text)[:250]
