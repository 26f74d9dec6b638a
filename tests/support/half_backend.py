"""A quantizer backend that is caught at its worst moment: half of a checkpoint is on disk, and it goes on forever."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.models.child import child_main
from pipeline.quantize import autoawq
from pipeline.quantize.base import Backend, QuantizeRequest, quantize

BACKEND = Backend(name="autoawq", module="tests.support.half_backend", environment="orchestrator")


def run(raw_request: dict[str, Any]) -> dict[str, Any]:
    """Copy the model, cut its weights, say so in a file beside the folder, and never end."""
    request = QuantizeRequest.model_validate(raw_request)
    shutil.copytree(request.model_dir, request.out_dir)
    weights = request.out_dir / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    request.out_dir.with_name("half").write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def stage(request_path: str) -> None:
    """What the stage does, with this backend."""
    autoawq.BACKEND = BACKEND
    quantize(
        QuantizeRequest.model_validate_json(Path(request_path).read_text()),
        sys.executable,
        log_path=Path(request_path).with_name("log"),
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        stage(sys.argv[1])
    else:
        sys.exit(child_main(run, sys.argv))
