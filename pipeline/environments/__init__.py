"""One environment per engine, built on demand from its lock and shared by all clones on a machine.

vLLM, AutoAWQ and the orchestrator exclude each other's pins, so each lives alone. An environment is kept in the
user's cache folder under its lock's hash and the Python version, and `.venv/<name>` in the clone links to it: a
second clone, a test's clone or DVC's temporary workspace finds it built. A changed lock is another folder, so an
old environment is never half-updated.

Standard library only: this code runs before anything is installed (`needed` alone reads settings, inside the orchestrator's).
"""

from pipeline.environments.build import (
    ENVIRONMENTS,
    ensure,
    interpreter,
    lock_file,
    locked,
    on_device,
    unpack,
)

__all__ = ["ENVIRONMENTS", "ensure", "interpreter", "lock_file", "locked", "on_device", "unpack"]
