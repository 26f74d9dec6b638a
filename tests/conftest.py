"""No test hangs on its user's environment: what would change what is run is taken out before anything reads it.

Standard library only, since every environment's pytest begins here.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# GIT_*: a test started by a git hook would work on the hook's repository. PROFILE and make's own: `make test` passes them on.
FOREIGN = ("VLLM_", "MLFLOW_", "DVC_", "GIT_", "HYDRA_", "QUANTGATE_CPU_PLUGIN", "PYTHONPATH")
OF_MAKE = ("PROFILE", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")
_settings = tempfile.TemporaryDirectory(prefix="quantgate-tests-")  # removed when the interpreter ends


def _isolate() -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN) or name in OF_MAKE]:
        del os.environ[name]
    git = Path(_settings.name) / "gitconfig"
    git.write_text("[safe]\n\tdirectory = *\n")  # the checkout may belong to another user, as in a container
    dvc = Path(_settings.name) / "dvc"
    os.environ |= {
        "GIT_CONFIG_GLOBAL": str(git),
        "GIT_CONFIG_NOSYSTEM": "1",
        "DVC_GLOBAL_CONFIG_DIR": str(dvc),
        "DVC_SYSTEM_CONFIG_DIR": str(dvc),
        # Servers of the tests' own are never behind a proxy; pip may need one.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


_isolate()
