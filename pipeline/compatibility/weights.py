"""Which of the engine's kernels multiplies a quantized checkpoint, and what it demands. Read from vLLM 0.32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pipeline.capacity.geometry import Geometry
from pipeline.compatibility.refusal import Refusal
from pipeline.compatibility.shards import joined, shards

READ_FROM = "0.32"
"""The engine version whose sources the rows are; others may differ."""


@dataclass(frozen=True)
class Engine:
    """What serves: `capability` of a card as 89 for 8.9, None on a CPU or where no card is known."""

    version: str
    kind: Literal["cpu", "cuda"]
    capability: int | None = None
    cpu_flags: Collection[str] = ()
    tensor_parallel: int = 1

    @property
    def is_read(self) -> bool:
        """Whether the tables were read from this version's sources."""
        return self.version == READ_FROM or self.version.startswith(f"{READ_FROM}.")


@dataclass(frozen=True)
class KernelRow:
    """One kernel for quantized weights. `formats` are those of the checkpoints that reach it."""

    kernel: str
    formats: tuple[str, ...]
    kind: Literal["cpu", "cuda"]
    lowest_capability: int | None
    cpu_flag: str | None
    """The vector extension without which it doesn't exist; None: it needs none."""
    group_sizes: tuple[int, ...]
    """Empty for 8-bit floats, which have a scale per output."""
    inputs_multiple: int
    outputs_multiple: int
    """Of joined modules (qkv, gate and up) on one rank."""
    emulated: bool
    source: str


FP8_SOURCE = (
    "vLLM 0.32, layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py (from capability 8.9) and "
    "model_executor/kernels/linear/__init__.py: _POSSIBLE_FP8_KERNELS, _POSSIBLE_WFP8A16_KERNELS"
)
# In the engine's own order: the first that fits is taken.
WEIGHT_KERNELS = (
    KernelRow(
        # Shapes that don't fit its tiles (64 x 128) are padded when weights are loaded: only groups cut by a rank are refused.
        "MarlinLinearKernel", ("awq", "pack-quantized"), "cuda", 75, None, (32, 64, 128), 1, 1, False,
        "vLLM 0.32, model_executor/kernels/linear/mixed_precision/marlin.py and quantization/utils/marlin_utils.py",
    ),
    KernelRow(
        "CPUWNA16LinearKernel", ("awq", "pack-quantized"), "cpu", None, "avx512f", (32, 64, 128), 32, 32, False,
        "vLLM 0.32, model_executor/kernels/linear/mixed_precision/cpu.py",
    ),
    KernelRow(
        "Int4PackLinearKernel", ("awq", "pack-quantized"), "cpu", None, "avx2", (32, 64, 128), 1, 16, True,
        "pipeline/serving/cpu_plugin/int4_linear.py",
    ),
    # FlashInfer's comes before it, but only for a scale per tensor; shapes that aren't multiples of 16 are padded.
    KernelRow(
        "CutlassFP8ScaledMMLinearKernel", ("float-quantized",), "cuda", 89, None, (), 1, 1, False, FP8_SOURCE,
    ),
    # Before 8.9 there are no FP8 units: weights are widened on the way, and activations stay at 16 bits.
    KernelRow(
        "MarlinFP8ScaledMMLinearKernel", ("float-quantized",), "cuda", 75, None, (), 1, 1, False, FP8_SOURCE,
    ),
    KernelRow(
        # AMX-FP8, which its predecessor in the list needs, is in no processor that is sold (Diamond Rapids).
        "ChannelWiseTorchFP8ScaledMMLinearKernel", ("float-quantized",), "cpu", None, None, (), 1, 1, False,
        "vLLM 0.32, model_executor/kernels/linear/scaled_mm/pytorch.py",
    ),
)  # fmt: skip
STOCK_INT4, PLUGIN_INT4 = (row.kernel for row in WEIGHT_KERNELS if row.kind == "cpu" and "awq" in row.formats)
"""The two that a CPU can multiply 4-bit weights with: the engine's own and the plugin's."""


def weight_kernel(engine: Engine, scheme_format: str) -> KernelRow | None:
    """The kernel that the engine takes for a checkpoint of this format; None where it has none."""
    return next((row for row in WEIGHT_KERNELS if _fits(row, engine, scheme_format)), None)


def _fits(row: KernelRow, engine: Engine, scheme_format: str) -> bool:
    if row.kind != engine.kind or scheme_format not in row.formats:
        return False
    flagged = row.cpu_flag is None or row.cpu_flag in engine.cpu_flags
    return flagged and (engine.capability is None or engine.capability >= (row.lowest_capability or 0))


def weight_refusals(
    geometry: Geometry, engine: Engine, scheme_format: str, group_size: int | None
) -> list[Refusal]:
    """Why the engine can't serve a quantized checkpoint of a model, each with what to do instead.

    `group_size`: None for a format without groups.
    """
    row = weight_kernel(engine, scheme_format)
    if row is None:
        return [_no_kernel(engine, scheme_format)]
    found = []
    if group_size is not None and group_size not in row.group_sizes:
        sizes = ", ".join(map(str, row.group_sizes))
        found.append(
            Refusal(f"{row.kernel} has no group size {group_size}", f"use group_size {sizes}", row.source)
        )
    for part in joined(shards(geometry, engine.tensor_parallel)):
        for what, width, multiple in (
            ("inputs", part.inputs, row.inputs_multiple),
            ("outputs", part.outputs, row.outputs_multiple),
        ):
            if width % multiple:
                fix = "use fewer cards" if engine.tensor_parallel > 1 else "serve this model in BF16"
                found.append(
                    Refusal(
                        f"{row.kernel} needs a multiple of {multiple} {what}, {part.name} has {width:g}",
                        fix,
                        row.source,
                    )
                )
    return found


def _no_kernel(engine: Engine, scheme_format: str) -> Refusal:
    rows = [row for row in WEIGHT_KERNELS if row.kind == engine.kind and scheme_format in row.formats]
    if not rows:
        known = sorted({name for row in WEIGHT_KERNELS for name in row.formats})
        return Refusal(
            f"no kernel on {engine.kind} reads the format {scheme_format!r}", f"formats are {', '.join(known)}",
            "pipeline/compatibility/weights.py",
        )  # fmt: skip
    what = "8-bit float" if scheme_format == "float-quantized" else "4-bit"
    if engine.kind == "cuda":
        lowest = min(row.lowest_capability or 0 for row in rows)
        return Refusal(
            f"{what} weights need compute capability {lowest / 10:.1f}, this card has {(engine.capability or 0) / 10:.1f}",
            "use a newer card, or only variants with BF16 weights",
            rows[0].source,
        )
    flags = " or ".join(row.cpu_flag or "" for row in rows)
    return Refusal(
        f"{what} weights on a CPU need {flags}, this one has neither", "use another machine", rows[0].source
    )
