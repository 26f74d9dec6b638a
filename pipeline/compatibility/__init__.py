"""What quantizers and the engine can do with which model, device and version: tables with a source in every row.

`quantgate doctor` and the stage `quantize` ask the same functions, so what doctor lets pass isn't refused an hour later. Tests
hold the tables against the packages that are installed.
"""

from pipeline.compatibility.attention import AttentionRow, attention_backends, attention_refusals
from pipeline.compatibility.quantizers import (
    QUANTIZERS,
    Request,
    quantizer_refusals,
    weight_format,
    weight_scheme,
)
from pipeline.compatibility.refusal import Refusal
from pipeline.compatibility.weights import WEIGHT_KERNELS, Engine, weight_kernel, weight_refusals

__all__ = [
    "QUANTIZERS",
    "WEIGHT_KERNELS",
    "AttentionRow",
    "Engine",
    "Refusal",
    "Request",
    "attention_backends",
    "attention_refusals",
    "quantizer_refusals",
    "weight_format",
    "weight_kernel",
    "weight_refusals",
    "weight_scheme",
]
