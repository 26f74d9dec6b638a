"""How to read a verdict, and what every word and metric means."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.sections.base import Section

HOW_TO_READ = (
    "GO: every gate passed. The variant holds the needed sequences, and the data rule out a quality loss as large as "
    "the margin.",
    "NO-GO: at least one gate failed on evidence: too few sequences fit, or the loss is surely larger than the margin.",
    "INCONCLUSIVE: a gate could not run, or the interval spans the margin. The gate says why, and how many items would "
    "decide it. It is not a weak GO.",
    "“No significant difference” is never a GO: a small eval set finds nothing significant, however bad the variant. "
    "Only an interval that lies wholly above the margin counts.",
    "Compare every change with the A/A control. A variant that flips no more items than the reference does against "
    "itself has changed nothing that this eval set can see.",
)

WORDS = (
    ("variant", "One combination of weights scheme, KV-cache dtype and engine options."),
    ("reference", "The variant that all changes are taken against."),
    ("A/A control", "The reference run a second time. Whatever differs between the two is noise."),
    ("profile", "A complete scenario: model, device, variants, load, eval set, latency limits and policy."),
    ("kappa", "KV bytes per token: 2 (K and V) × layers × KV heads × head size × bytes per element."),
    (
        "KV budget",
        "Utilization × memory, less weights, activations and overhead: what is left for the KV pool.",
    ),
    ("capacity", "What fits in the KV pool, in tokens and in whole sequences of max_model_len tokens."),
    ("null block", "A block that vLLM keeps for itself: its log counts it, a sequence can't use it."),
    (
        "p50, p90",
        "Half, or nine in ten, of the requests took at most this long. A failed request counts as infinitely late.",
    ),
    ("flip", "An item that one run answers correctly and the other one doesn't."),
    ("margin", "The accuracy loss that the policy accepts; more is NO-GO."),
    ("slice", "A named part of the eval set, e.g. code or long context."),
    (
        "perplexity ratio",
        "Perplexity of the quantized model on held-out text divided by the original's; 1 is no change.",
    ),
    (
        "effective weight error",
        "‖effective - original‖ / ‖original‖ of a module's weights, with AWQ's scale folding undone.",
    ),
    (
        "emulated memory budget",
        "A number of bytes that stands in for a card's memory; no such card was used.",
    ),
    (
        "emulated kernel",
        "A part computed by the CPU plugin: the same numbers as the stock kernel's format, another speed.",
    ),
    ("not measured", "No number exists. It doesn't mean zero."),
)


def section(bundle: ResultBundle) -> Section:
    """The reader's key: the report's words, then the load metrics as the package that computes them defines them."""
    from pipeline.load.metrics import METRICS

    metrics = [(f"{metric.name} ({metric.unit})", f"{metric.definition}.") for metric in METRICS]
    return Section("reading", "How to read this", HOW_TO_READ, definitions=[*WORDS, *metrics])
