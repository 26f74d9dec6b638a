"""With what a card's engine compiles: the tools of its own environment, whatever the machine has beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.compatibility.compilers import SAMPLER, SAMPLER_DEFAULT
from pipeline.environments.toolkit import cuda_home
from pipeline.files import cache_folder

REMOVED = frozenset({"CUDA_PATH", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"})
REMOVED_PREFIX = "FLASHINFER_"
"""Inherited variables that would lead FlashInfer or nvcc to another toolkit, other flags, another card or another cache."""


def compile_environment(variables: Mapping[str, str], python: str | Path | None) -> dict[str, str]:
    """The engine's variables with its compilers: those beside `python` first on the PATH, its toolkit, our cache for what they make.

    FlashInfer keeps modules by its own version and the card's architecture, so a second start compiles nothing. CC and CXX stay the
    user's to say, and so does MAX_JOBS (parallel compilations), where memory is short.
    """
    environment = {
        name: value
        for name, value in variables.items()
        if name not in REMOVED and not name.startswith(REMOVED_PREFIX)
    }
    environment.setdefault(SAMPLER, SAMPLER_DEFAULT)
    environment["FLASHINFER_WORKSPACE_BASE"] = str(cache_folder("flashinfer"))
    if python is not None:
        home = Path(python).absolute().parents[1]  # of the environment, not of what its python links to
        inherited = variables.get("PATH", os.defpath)
        environment["PATH"] = os.pathsep.join([str(home / "bin"), inherited])
        environment["CUDA_HOME"] = str(cuda_home(home))
    return environment
