"""What every backend's process begins and ends with, so that their records say the same of what was done."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.models.child import Progress
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.calibration import calibration_pieces, kv_pieces
from pipeline.quantize.memory import peak_memory


@dataclass(frozen=True)
class Job:
    """One quantization, ready to run: a seeded process, and calibration text as sequences of one length.

    `calibration` and `kv_calibration` record what `pieces` and `kv_pieces` are made of; None, and no pieces, where nothing reads any.
    """

    request: QuantizeRequest
    progress: Progress
    tokenizer: Any
    pieces: list[list[int]]
    calibration: dict[str, Any] | None
    kv_pieces: list[list[int]]
    kv_calibration: dict[str, Any] | None
    on_cuda: bool

    def evidence(self, packages: Sequence[str]) -> dict[str, Any]:
        """Versions of `packages`, calibration counts, device and peak memory: what a backend's `run` returns."""
        import torch

        return {
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "calibration": self.calibration,
            "kv_calibration": self.kv_calibration,
            "device": torch.cuda.get_device_name() if self.on_cuda else "cpu",
            **peak_memory(),
        }


def begin(raw_request: dict[str, Any]) -> Job:
    """Check the request, seed torch and read the calibration text. `UserInputError` where there is too little of it."""
    import torch
    from transformers import AutoTokenizer

    request = QuantizeRequest.model_validate(raw_request)
    torch.manual_seed(request.recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(request.model_dir)
    recipe, progress = request.recipe, Progress(request.progress_file)
    none: tuple[list[list[int]], None] = ([], None)
    pieces, calibration = calibration_pieces(request, tokenizer) if recipe.searches_weights else none
    of_kv, kv_calibration = kv_pieces(request, tokenizer) if recipe.calibrate_kv_scales else none
    return Job(
        request, progress, tokenizer, pieces, calibration, of_kv, kv_calibration, torch.cuda.is_available()
    )
