"""`python3 -m pipeline STAGE PROFILE [ITEM]`: run a stage in the orchestrator's environment, which is built if needed.

What dvc.yaml and runs/stages.yaml call. Standard library only, since it runs on whatever `python3` there is: in a fresh
clone, in CI and in DVC's temporary workspaces, none of which has an environment of its own.
"""

from __future__ import annotations

import os
import sys

if sys.version_info < (3, 9):  # noqa: UP036  whatever python3 there is starts this
    sys.exit("error: Python 3.11 is needed to run quantgate (any Python from 3.9 on can start it)")

from pipeline.environments import interpreter
from pipeline.errors import UserInputError, run_main

STAGES = ("environment", "prepare", "quantize", "plan", "measure", "quality", "verdict", "report", "track")


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in STAGES:
        given = sys.argv[1] if len(sys.argv) > 1 else "none"
        raise UserInputError(f"stage {given!r} isn't one; allowed are {', '.join(STAGES)}")
    python = str(interpreter("orchestrator"))
    sys.stdout.flush()
    os.execv(python, [python, "-m", f"pipeline.stages.{sys.argv[1]}", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(run_main(main))
