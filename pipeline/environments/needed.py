"""Which environments a profile needs. The settings are read in the orchestrator's, the only one with Hydra."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from pipeline.environments.build import ROOT, ensure, on_device
from pipeline.errors import EnvironmentUnfitError, UserInputError, run_main

if TYPE_CHECKING:
    from pipeline.settings import Settings


def environments_of(settings: Settings) -> list[str]:
    """The orchestrator's, the engine's, and those of the profile's quantizers, for the profile's device."""
    from pipeline.quantize.base import backend

    quantizers = sorted({backend(recipe.backend).environment for recipe in settings.quantizers.values()})
    return ["orchestrator", *(on_device(name, settings.device.kind) for name in ("serve", *quantizers))]


def selected() -> list[str]:
    """The same for the profile in params.yaml, asked in the orchestrator's environment, which is built for it."""
    python = ensure("orchestrator") / "bin" / "python"
    answer = subprocess.run(
        [python, "-m", "pipeline.environments.needed"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        said = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
        kind = UserInputError if answer.returncode == UserInputError.exit_code else EnvironmentUnfitError
        raise kind(said)
    return answer.stdout.split()


def main() -> int:
    from pipeline.settings import chosen_profile, load_settings

    print(*environments_of(load_settings([f"profile={chosen_profile()}"])))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
