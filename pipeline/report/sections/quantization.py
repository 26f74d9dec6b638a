"""Proof that the quantized weights are what was asked for and still the model, all schemes and backends side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import NOT_MEASURED, count, listing, mebibytes, number, percent, seconds
from pipeline.results import CalibrationUsed, Quantization


def section(bundle: ResultBundle) -> Section:
    """One column per scheme."""
    schemes = bundle.quantizations
    if not schemes:
        return Section("quantization", "Quantization", ["No quantized weights are part of this run."])
    return Section(
        "quantization",
        "Quantization",
        [
            "Read back from the finished checkpoint: which modules are really quantized, how far the effective weights "
            "are from the original ones (where AWQ folded scales, with that undone), and perplexity on text that calibration "
            "never saw, beside that of weights which are merely rounded at the same bits and group size. FP8 is plain rounding, "
            "of activations too; its perplexity is with both."
        ],
        [proof_table(schemes)],
    )


def proof_table(schemes: Mapping[str, Quantization]) -> Table:
    """Figures down, schemes across."""
    labels: dict[str, Callable[[Quantization], Cell]] = {
        "Backend": _backend,
        "Checkpoint": _format,
        "Quantized modules": _modules,
        "Left as they are": _left,
        "Perplexity, original": lambda record: figure(number(record.perplexity.original)),
        "Perplexity, quantized": _perplexity,
        "Perplexity ratio": _ratio,
        "Ratio of merely rounded weights": lambda record: figure(
            number(record.perplexity.round_to_nearest, 3)
        ),
        "Share of rounding's loss": _share,
        "Effective weight error, mean": lambda record: figure(percent(record.effective_error.mean)),
        "Effective weight error, worst layer": _worst_layer,
        "Effective weight error, worst module": lambda record: figure(
            percent(record.effective_error.worst.value), note=record.effective_error.worst.module
        ),
        "NaN or infinite values": lambda record: figure(
            count(record.nan_inf.found), note=f"{record.nan_inf.tensors_scanned:,} tensors scanned"
        ),
        "FP8 KV scales": _kv_scales,
        "Range of the KV scales": _coverage,
        "Saturated keys or values": _saturated,
        "Largest key and value": _largest,
        "Weights size": _size,
        "Calibration": lambda record: _calibration(record.calibration),
        "Calibration of the KV scales": lambda record: _calibration(record.kv_calibration),
        "Search": _search,
        "Time": lambda record: figure(
            seconds(record.wall_s), note=f"of which {seconds(record.proof_wall_s)} for the proof"
        ),
        "Peak memory": _memory,
    }
    rows = [[name(label), *[cell(record) for record in schemes.values()]] for label, cell in labels.items()]
    return Table("Quantization proof", [Column("Figure"), *[Column(scheme) for scheme in schemes]], rows)


def _backend(record: Quantization) -> Cell:
    versions = (f"{package} {version}" for package, version in record.versions.items())
    return words(record.backend, note=", ".join(versions))


def _format(record: Quantization) -> Cell:
    if record.group_size is None:
        kind = ", a scale per output, activations rounded too" if record.activations else ""
        return Cell(f"{record.bits} bit{kind}", note=record.format)
    kind = "with zero points" if record.zero_point else "symmetric"
    return Cell(f"{record.bits} bit, groups of {record.group_size}, {kind}", note=record.format)


def _modules(record: Quantization) -> Cell:
    found = record.quantized_modules
    note = f"missing: {listing(found.missing[:3])}" if found.missing else ""
    return figure(f"{found.found:,} of {found.expected:,}", note=note)


def _left(record: Quantization) -> Cell:
    """By name where they are few; the layers' alike are counted together, all of a model's would be a column of their own."""
    left = record.unquantized_modules
    if len(left) <= 4:
        return words(", ".join(left), note=", ".join(left.values()))
    alike = Counter((re.sub(r"\.\d+\.", ".*.", module), dtype) for module, dtype in left.items())
    names = (f"{times} x {module} ({dtype})" for (module, dtype), times in alike.items())
    return figure(f"{len(left):,} matrices", note=", ".join(names))


def _perplexity(record: Quantization) -> Cell:
    found = record.perplexity
    return figure(number(found.quantized), note=f"on {found.heldout_tokens:,} held-out tokens")


def _ratio(record: Quantization) -> Cell:
    return figure(number(record.perplexity.ratio, 3), note=f"limit {number(record.perplexity.limit, 2)}")


def _share(record: Quantization) -> Cell:
    limit = record.perplexity.share_of_rounding_loss_limit
    note = "" if limit is None else f"limit {percent(limit, 0)}"
    return figure(percent(record.perplexity.share_of_rounding_loss, 0), note=note)


def _worst_layer(record: Quantization) -> Cell:
    worst, allowed = record.effective_error.worst_layer, record.effective_error.layer_range
    within = "" if allowed is None else f", allowed {percent(allowed[0], 0)} to {percent(allowed[1], 0)}"
    return figure(percent(worst.value), note=f"layer {worst.layer}{within}")


def _kv_scales(record: Quantization) -> Cell:
    found = record.kv_scales
    if found is None:
        return Cell("none")
    ranges = (
        f"{part} {low:g} to {high:g}" for part, (low, high) in (("keys", found.key), ("values", found.value))
    )
    return figure(f"{found.layers:,} layers", note=", ".join(ranges))


def _coverage(record: Quantization) -> Cell:
    found = record.kv_scales
    if found is None:
        return figure(NOT_MEASURED)
    low, high = found.coverage
    return figure(f"{number(low)} to {number(high)}", note="times the largest key or value on held-out text")


def _saturated(record: Quantization) -> Cell:
    found = record.kv_scales
    if found is None:
        return figure(NOT_MEASURED)
    worst = found.saturated
    return figure(percent(worst.share, 3), note=f"{worst.scale}, limit {percent(worst.limit)}")


def _largest(record: Quantization) -> Cell:
    found = record.kv_scales
    if found is None:
        return figure(NOT_MEASURED)
    text = f"{number(found.largest_key, 1)} and {number(found.largest_value, 1)}"
    return figure(text, note="on held-out text; at scale 1.0 what is beyond 448 saturates")


def _size(record: Quantization) -> Cell:
    return figure(
        mebibytes(record.weight_bytes),
        note=f"planned {mebibytes(record.predicted_weight_bytes)}, from {mebibytes(record.original_weight_bytes)}",
    )


def _calibration(used: CalibrationUsed | None) -> Cell:
    if used is None:
        return Cell("none")
    kind = "chat template applied" if used.chat_template else "plain text"
    return figure(
        f"{used.effective_tokens:,} tokens",
        note=f"{used.effective_samples:,} x {used.sequence_tokens:,}, from {used.texts:,} texts with {used.available_tokens:,}; {kind}",
    )


def _search(record: Quantization) -> Cell:
    """What was searched; KV scales are only observed, and FP8 only rounds."""
    if record.group_size is None:
        return Cell("none")
    if record.recipe.get("method") == "gptq":
        return Cell("rounding errors made up for (GPTQ)")
    return Cell("scales and clipping" if record.recipe.get("clip_search") else "scales")


def _memory(record: Quantization) -> Cell:
    device = record.peak_device_memory_bytes
    return figure(
        mebibytes(record.peak_memory_bytes), note="" if device is None else f"{mebibytes(device)} on the card"
    )
