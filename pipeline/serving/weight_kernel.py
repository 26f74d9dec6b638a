"""Do the quantized weights run on the kernel that a card serves them with?

vLLM serves AWQ on Marlin where it can and falls back without an error where it can't, or where a flag forces it: 23 instead of
123 tok/s on one card (vLLM issue 21376). Throughput of the fallback must never be shown as that of AWQ.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EngineFailedError
from pipeline.serving.command import ServeSpec
from pipeline.serving.flags.table import canonical
from pipeline.serving.signals import LogSignals

FAST = "Marlin"
CHOOSES = "--linear-backend"


def check_weight_kernel(spec: ServeSpec, quantized: bool, log: LogSignals, log_path: Path) -> None:
    """Raise `EngineFailedError` where a layer of quantized weights runs on a card, but not on Marlin.

    A variant that names a kernel itself (`--linear-backend`) means what it names. What the log doesn't tell isn't judged here:
    the gate `kernel-provenance` makes it INCONCLUSIVE.
    """
    if spec.target != "cuda" or not quantized or log.weights_kernel is None:
        return
    if any(canonical(argument) == CHOOSES for argument in spec.extra_args):
        return
    slow = [kernel for kernel in log.weights_kernel.split("+") if FAST not in kernel]
    if slow:
        raise EngineFailedError(
            f"{spec.served_name}: the engine runs its 4-bit weights on {' and '.join(slow)} instead of Marlin, several times "
            f"slower; name the kernel in engine_args ({CHOOSES}) if that is meant; its log is {log_path}"
        )
