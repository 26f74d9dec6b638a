"""Proof that the quantized weights are what was asked for and still the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections.base import Section
from pipeline.report.table import Cell, Column, Table, figure, name, words
from pipeline.report.wording import NOT_MEASURED, count, listing, mebibytes, number, percent, seconds


def section(bundle: ResultBundle) -> Section:
    """One column per scheme."""
    schemes = proven_schemes(bundle)
    if not schemes:
        return Section("quantization", "Quantization", ["No quantized weights are part of this run."])
    return Section(
        "quantization",
        "Quantization",
        [
            "Read back from the finished checkpoint: which modules are really quantized, how far the effective weights "
            "are from the original ones (AWQ's scale folding undone), and perplexity on text that calibration never saw."
        ],
        [proof_table(schemes)],
    )


def proven_schemes(bundle: ResultBundle) -> dict[str, Mapping[str, Any]]:
    """Schemes that were really quantized; BF16 weights have nothing to prove."""
    return {
        scheme: record
        for scheme, record in sorted(bundle.quantizations.items())
        if record.get("bits") is not None or record.get("perplexity") is not None
    }


def dig(record: Mapping[str, Any], *path: str) -> Any:
    """The value at a path of keys, or None where any step is missing."""
    value: Any = record
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def proof_table(schemes: Mapping[str, Mapping[str, Any]]) -> Table:
    """Figures down, schemes across."""
    labels: dict[str, Callable[[Mapping[str, Any]], Cell]] = {
        "Backend": _backend,
        "Bits, group size, zero point": _format,
        "Quantized modules": _modules,
        "Perplexity, original": lambda record: figure(number(dig(record, "perplexity", "original"))),
        "Perplexity, quantized": _perplexity,
        "Perplexity ratio": _ratio,
        "Effective weight error, mean": lambda record: figure(
            percent(dig(record, "effective_error", "mean"))
        ),
        "Effective weight error, worst module": _worst,
        "NaN or infinite values": _non_finite,
        "Calibration": _calibration,
        "Weights size": _size,
        "Time": lambda record: figure(seconds(record.get("wall_s"))),
        "Peak memory": lambda record: figure(mebibytes(record.get("peak_memory_bytes"))),
    }
    rows = [[name(label), *[cell(record) for record in schemes.values()]] for label, cell in labels.items()]
    return Table("Quantization proof", [Column("Figure"), *[Column(scheme) for scheme in schemes]], rows)


def _backend(record: Mapping[str, Any]) -> Cell:
    versions = record.get("versions") or {}
    return words(
        record.get("backend"), note=", ".join(f"{package} {version}" for package, version in versions.items())
    )


def _format(record: Mapping[str, Any]) -> Cell:
    parts = [record.get("bits"), record.get("group_size"), record.get("zero_point")]
    if all(part is None for part in parts):
        return words(None)
    zero_point = NOT_MEASURED if parts[2] is None else "yes" if parts[2] else "no"
    return Cell(f"{parts[0]} bit, {parts[1]}, {zero_point}")


def _modules(record: Mapping[str, Any]) -> Cell:
    found, expected = dig(record, "quantized_modules", "found"), dig(record, "quantized_modules", "expected")
    if found is None or expected is None:
        return words(None)
    missing = dig(record, "quantized_modules", "missing") or []
    return figure(f"{found:,} of {expected:,}", note=f"missing: {listing(missing[:3])}" if missing else "")


def _perplexity(record: Mapping[str, Any]) -> Cell:
    tokens = dig(record, "perplexity", "heldout_tokens")
    note = "" if tokens is None else f"on {tokens:,} held-out tokens"
    return figure(number(dig(record, "perplexity", "quantized")), note=note)


def _ratio(record: Mapping[str, Any]) -> Cell:
    limit = dig(record, "perplexity", "limit")
    return figure(
        number(dig(record, "perplexity", "ratio"), 3),
        note="" if limit is None else f"limit {number(limit, 2)}",
    )


def _worst(record: Mapping[str, Any]) -> Cell:
    return figure(
        percent(dig(record, "effective_error", "worst", "value")),
        note=str(dig(record, "effective_error", "worst", "module") or ""),
    )


def _non_finite(record: Mapping[str, Any]) -> Cell:
    scanned = dig(record, "nan_inf", "tensors_scanned")
    return figure(
        count(dig(record, "nan_inf", "found")), note="" if scanned is None else f"{scanned:,} tensors scanned"
    )


def _calibration(record: Mapping[str, Any]) -> Cell:
    tokens = dig(record, "calibration", "effective_tokens")
    if tokens is None:
        return words(None)
    samples, texts = dig(record, "calibration", "effective_samples"), dig(record, "calibration", "texts")
    return figure(
        f"{tokens:,} tokens used", note=f"{count(samples)} samples packed from {count(texts)} texts"
    )


def _size(record: Mapping[str, Any]) -> Cell:
    before = record.get("original_weight_bytes")
    return figure(
        mebibytes(record.get("weight_bytes")), note="" if before is None else f"from {mebibytes(before)}"
    )
