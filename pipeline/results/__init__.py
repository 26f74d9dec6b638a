"""The result files' one schema: what a stage writes and the next ones read.

Every published figure lives in one of these models. `None` means "not measured": never zero, never a guess.
The stages write them with `save`, readers get them back with `load`, so a file that was cut, edited or made by
another version is refused by name instead of being half understood.
"""

from pipeline.results.machine import (
    EngineFacts,
    Environment,
    Gpu,
    GpuLoad,
    GpuMemory,
    GpuProcess,
    KernelChoice,
    KernelTimes,
    Provenance,
)
from pipeline.results.measure import (
    Distribution,
    FillTest,
    LoadLevel,
    Measurement,
    MemoryRun,
    Probe,
    SloSearch,
    SteadyWindow,
)
from pipeline.results.plan import BudgetTerm, Capacity, HandRow, Plan, PlanRow
from pipeline.results.quality import Quality, RollingText, Sample, SliceScore, TaskFormat, TaskScores
from pipeline.results.quantize import (
    CalibrationUsed,
    EffectiveError,
    FiniteScan,
    KvScales,
    LayerError,
    ModuleCount,
    ModuleError,
    Quantization,
    QuantizedPerplexity,
    Saturation,
    TextFile,
)
from pipeline.results.record import AnyRecord, Decision, Record, load, save
from pipeline.results.time import Phase, StageTime
from pipeline.results.verdict import (
    Divergence,
    Estimate,
    Gate,
    QualityDelta,
    Rung,
    Throughput,
    VariantVerdict,
    Verdict,
)

__all__ = [
    "AnyRecord",
    "BudgetTerm",
    "CalibrationUsed",
    "Capacity",
    "Decision",
    "Distribution",
    "Divergence",
    "EffectiveError",
    "EngineFacts",
    "Environment",
    "Estimate",
    "FillTest",
    "FiniteScan",
    "Gate",
    "Gpu",
    "GpuLoad",
    "GpuMemory",
    "GpuProcess",
    "HandRow",
    "KernelChoice",
    "KernelTimes",
    "KvScales",
    "LayerError",
    "LoadLevel",
    "Measurement",
    "MemoryRun",
    "ModuleCount",
    "ModuleError",
    "Phase",
    "Plan",
    "PlanRow",
    "Probe",
    "Provenance",
    "Quality",
    "QualityDelta",
    "Quantization",
    "QuantizedPerplexity",
    "Record",
    "RollingText",
    "Rung",
    "Sample",
    "Saturation",
    "SliceScore",
    "SloSearch",
    "StageTime",
    "SteadyWindow",
    "TaskFormat",
    "TaskScores",
    "TextFile",
    "Throughput",
    "VariantVerdict",
    "Verdict",
    "load",
    "save",
]
