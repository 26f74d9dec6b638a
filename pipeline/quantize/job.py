"""What every backend's process begins and ends with, so that their records say the same of what was done."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.models.child import Progress
from pipeline.quantize.base import QuantizeRequest
from pipeline.quantize.calibration import calibration_pieces
from pipeline.quantize.memory import peak_memory


@dataclass(frozen=True)
class Job:
    """One quantization, ready to run: a seeded process, and calibration text as sequences of one length."""

    request: QuantizeRequest
    progress: Progress
    tokenizer: Any
    pieces: list[list[int]]
    calibration: dict[str, Any]
    """The record of what `pieces` are made of."""
    on_cuda: bool

    def evidence(self, packages: Sequence[str]) -> dict[str, Any]:
        """Versions of `packages`, calibration counts, device and peak memory: what a backend's `run` returns."""
        import torch

        return {
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "calibration": self.calibration,
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
    pieces, calibration = calibration_pieces(request, tokenizer)
    progress = Progress(request.progress_file)
    return Job(request, progress, tokenizer, pieces, calibration, torch.cuda.is_available())
