"""Stage `quantize@SCHEME`: quantize the reference into `artifacts/weights/SCHEME` and prove the result."""

from __future__ import annotations

import sys

from pipeline.errors import UserInputError
from pipeline.quality.tasks import refuse_leaks
from pipeline.quantize.base import QuantizeRequest, backend, quantize
from pipeline.results import save
from pipeline.settings import Settings
from pipeline.stages.context import LOGS, RESULTS, WEIGHTS, python_of, stage_main, weights_folder


def run(settings: Settings, scheme: str) -> None:
    if scheme not in settings.quantizers:
        raise UserInputError(
            f"weights scheme {scheme!r} isn't in the profile {settings.profile}; it has {', '.join(settings.quantizers)}"
        )
    refuse_leaks(settings)
    request = QuantizeRequest.of(settings, scheme, weights_folder("bf16"), WEIGHTS / scheme)
    python = python_of(settings, backend(request.recipe.backend).environment)
    record = quantize(request, python, log_path=LOGS / f"quantize-{scheme}.log")
    save(RESULTS / "quantize" / f"{scheme}.json", record)
    print(f"{scheme}: perplexity x{record.perplexity.ratio:.3f}, {record.weight_bytes / 1024**2:.1f} MiB")


if __name__ == "__main__":
    sys.exit(stage_main(run, "weights scheme"))
