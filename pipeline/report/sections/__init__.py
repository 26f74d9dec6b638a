"""The report's sections as plain data: what is said, in which order, for HTML and Markdown alike."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections import (
    capacity,
    load,
    provenance,
    quality,
    quantization,
    reference,
    rescue,
    time,
    verdict,
)
from pipeline.report.sections.base import Section


def build_sections(bundle: ResultBundle) -> list[Section]:
    """All sections in reading order: the decision first, then the evidence, then where it came from."""
    found = [
        verdict.section(bundle),
        rescue.section(bundle),
        capacity.section(bundle),
        load.section(bundle),
        quality.section(bundle),
        quantization.section(bundle),
        verdict.gates_section(bundle),
        provenance.section(bundle),
        time.section(bundle),
        reference.section(bundle),
    ]
    return [section for section in found if section is not None]


__all__ = ["Section", "build_sections"]
