"""Do the quantized weights run on the kernel that a card serves them with?

vLLM serves 4-bit weights on Marlin where it can and falls back without an error where it can't, or where a flag forces it: 23
instead of 123 tok/s on one card (vLLM issue 21376). FP8 weights run on FP8 units from compute capability 8.9 on; on Marlin, which
widens them, neither speed nor activations are those of W8A8. Throughput of a fallback must never be shown as the scheme's.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.compatibility import Engine, weight_kernel
from pipeline.errors import EngineFailedError
from pipeline.serving.command import ServeSpec
from pipeline.serving.flags.table import canonical
from pipeline.serving.signals import LogSignals

# Machete is Hopper's own, taken before Marlin there (vLLM 0.32 kernels/linear/__init__.py: _POSSIBLE_KERNELS).
FAST_INTEGERS = ("Marlin", "Machete")
CHOOSES = "--linear-backend"


def check_weight_kernel(
    spec: ServeSpec, weights: str, capability: int | None, log: LogSignals, log_path: Path
) -> None:
    """Raise `EngineFailedError` where a layer of quantized weights runs on a card, but not on its format's kernel.

    `weights`: their format as `compatibility.WEIGHT_KERNELS` names it, "none" for unquantized ones; `capability`: the card's, 89
    for 8.9, None where it isn't known. A variant that names a kernel itself (`--linear-backend`) means what it names. What the
    log doesn't tell isn't judged here: the gate `kernel-provenance` makes it INCONCLUSIVE.
    """
    if spec.target != "cuda" or weights == "none" or log.weights_kernel is None:
        return
    if any(canonical(argument) == CHOOSES for argument in spec.extra_args):
        return
    meant = _meant(spec, weights, capability)
    slow = [kernel for kernel in log.weights_kernel.split("+") if not any(name in kernel for name in meant)]
    if slow:
        what = "8-bit float" if weights == "float-quantized" else "4-bit"
        raise EngineFailedError(
            f"{spec.served_name}: the engine runs its {what} weights on {' and '.join(slow)} instead of {meant[0]}, several times "
            f"slower; name the kernel in engine_args ({CHOOSES}) if that is meant; its log is {log_path}"
        )


def _meant(spec: ServeSpec, weights: str, capability: int | None) -> tuple[str, ...]:
    """Parts of the names of the kernels that serve this format at its speed."""
    if weights != "float-quantized":
        return FAST_INTEGERS
    row = weight_kernel(Engine(spec.engine_version, "cuda", capability), weights)
    return (row.kernel,) if row else ("a kernel for them",)
