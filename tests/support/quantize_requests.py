"""What to quantize in tests that only ask whether it may be: a tiny Llama and texts enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pipeline.quantize.base import QuantizeRequest
from pipeline.settings.schema import QuantizeRecipe
from tests.support.tiny_models import LLAMA, prose, write_model, write_texts


def tiny_request(folder: Path, device_kind: Literal["cpu", "cuda"] = "cpu", **recipe: Any) -> QuantizeRequest:
    """A sound request, its model and texts written into `folder`; groups of 64 unless `recipe` says otherwise."""
    return QuantizeRequest(
        scheme="awq",
        model_dir=write_model(folder / "model", LLAMA),
        out_dir=folder / "out",
        calibration_file=write_texts(folder / "calibration.jsonl", prose(5, seed=1)),
        heldout_file=write_texts(folder / "heldout.jsonl", prose(5, seed=2)),
        recipe=QuantizeRecipe(**{"group_size": 64, **recipe}),
        device_kind=device_kind,
    )
