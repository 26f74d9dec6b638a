"""What to quantize and how, the small interface of a backend, and the run that ends in a proven folder.

`quantize` runs in the orchestrator, which has no torch: the backend and the proof are modules of ours that run
in the backend's environment as subprocesses.
"""

from __future__ import annotations

import importlib
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.capacity.weights import weight_bytes as predicted_weight_bytes
from pipeline.compatibility import Request, quantizer_refusals, weight_scheme
from pipeline.errors import QuantgateError, UserInputError
from pipeline.files import read_json, sha256_file
from pipeline.gpu import engine_environment
from pipeline.models.architectures import expected_shapes, geometry, other_tensors
from pipeline.models.check import check_model, read_tensors, weight_bytes
from pipeline.models.child import run_module
from pipeline.models.prepare import replace_folder
from pipeline.quantize.calibration import refuse_overlap
from pipeline.quantize.room import Card, card_of, refuse_without_room, room_for, stored_element_bytes
from pipeline.results import Quantization
from pipeline.settings.schema import QuantizeRecipe, Settings

SIZE_TOLERANCE = 0.01
"""Share of the planner's bytes that a checkpoint may differ by: shapes and KV scales that some layouts add."""


class QuantizeRequest(BaseModel):
    """One quantization: folders, texts and the recipe. Paths are absolute or relative to the working folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: str
    """Name of the weights scheme that comes out: the profile's key, as in `results/quantize/<scheme>.json`."""
    model_dir: Path
    """Checked, unquantized model."""
    out_dir: Path
    """Where the quantized folder appears once every proof has passed."""
    calibration_file: Path
    """JSONL of {"id", "text"} or {"id", "messages"}."""
    heldout_file: Path
    """JSONL of the same form for perplexity; no text of it may be calibration text."""
    chat_template: bool = False
    """Whether both are put into the model's chat template."""
    recipe: QuantizeRecipe
    device_kind: Literal["cpu", "cuda"] = "cpu"
    """What the backend's environment is built for. One for cards computes on the CPU where torch sees no card."""
    tensor_parallel: int = 1
    """Cards that will share every layer of the result: a group of weights can't be cut between two."""
    progress_file: Path | None = None
    """Where the running module writes how far it is; set by the launcher."""

    @classmethod
    def of(cls, settings: Settings, scheme: str, model_dir: Path, out_dir: Path) -> QuantizeRequest:
        """What a profile asks for under the name `scheme`."""
        texts = settings.calibration
        return cls(
            scheme=scheme,
            model_dir=model_dir,
            out_dir=out_dir,
            calibration_file=Path(texts.file),
            heldout_file=Path(texts.heldout_file),
            chat_template=texts.chat_template,
            recipe=settings.quantizers[scheme].recipe,
            device_kind=settings.device.kind,
            tensor_parallel=settings.server.tensor_parallel,
        )


@dataclass(frozen=True)
class Backend:
    """What the launcher must know about a backend: its module, its environment, its process settings."""

    name: str
    module: str
    """Module run as `python -m MODULE request.json result.json`; writes `out_dir` and returns its evidence."""
    environment: str
    """Name of the environment (`.venv/<name>`) that it runs in."""
    process_environment: Mapping[str, str] = field(default_factory=dict)


def backend(name: str) -> Backend:
    """The backend of this name: the `BACKEND` of the module `pipeline.quantize.<name>`."""
    try:
        found: Backend = importlib.import_module(f"pipeline.quantize.{name}").BACKEND
    except (ModuleNotFoundError, AttributeError):
        raise UserInputError(
            f"quantizer.backend={name!r} is unknown; there is no such module in pipeline/quantize"
        ) from None
    return found


def quantize(
    request: QuantizeRequest, env_python: str | Path, *, log_path: str | Path | None = None, nvml: Any = None
) -> Quantization:
    """Quantize, prove, and only then put the folder in its place. Returns the record for `results/quantize/`.

    `env_python` is the interpreter of the backend's environment. Everything happens in a temporary folder
    beside `out_dir`; a failed proof leaves nothing there but the log (default `results/logs/quantize-<scheme>.log`).
    Of several cards the subprocesses see the one whose memory was checked. `nvml` stands in for the module pynvml in tests.
    Raises `UserInputError` before any work for a model or recipe that can't be quantized,
    `QuantgateError` naming what a proof found broken, `EngineFailedError` when a subprocess died.
    """
    started = time.monotonic()
    chosen = backend(request.recipe.backend)
    card = card_of(request.device_kind, nvml)
    check_request(request, card)
    environment = {**chosen.process_environment, **engine_environment([card.gpu] if card else [])}
    log = Path(log_path or f"results/logs/quantize-{request.scheme}.log")
    log.unlink(missing_ok=True)
    out = request.out_dir.absolute()
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    job = request.model_copy(
        update={
            "model_dir": request.model_dir.absolute(),
            "out_dir": staging,
            "calibration_file": request.calibration_file.absolute(),
            "heldout_file": request.heldout_file.absolute(),
        }
    ).model_dump(mode="json", exclude={"progress_file"})
    try:
        made = run_module(env_python, chosen.module, job, log, environment=environment, show_progress=True)
        made_at = time.monotonic()
        proven = run_module(
            env_python,
            "pipeline.quantize.proof",
            job,
            log,
            environment=environment,
            show_progress=True,
        )
        record = _record(request, chosen.name, staging, made, proven, (started, made_at))
        replace_folder(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return record


def _record(
    request: QuantizeRequest,
    backend_name: str,
    folder: Path,
    made: Mapping[str, Any],
    proven: Mapping[str, Any],
    marks: tuple[float, float],
) -> Quantization:
    """The record of a finished `folder`; `marks` are the monotonic times of the start and of the proof's start."""
    (started, made_at), ended = marks, time.monotonic()
    return Quantization.model_validate(
        {
            "scheme": request.scheme,
            "backend": backend_name,
            "versions": made["versions"],
            "recipe": request.recipe.model_dump(mode="json"),
            "calibration": _as_asked(made["calibration"], request),
            "kv_calibration": _as_asked(made["kv_calibration"], request),
            "heldout": {"file": str(request.heldout_file), "sha256": sha256_file(request.heldout_file)},
            "device": made["device"],
            **proven["evidence"],
            **check_size(request, folder),
            "original_weight_bytes": weight_bytes(request.model_dir),
            "size_on_disk_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            "wall_s": round(ended - started, 2),
            "quantize_wall_s": round(made_at - started, 2),
            "proof_wall_s": round(ended - made_at, 2),
            **{
                key: max((part[key] for part in (made, proven) if part[key] is not None), default=None)
                for key in ("peak_memory_bytes", "peak_device_memory_bytes")
            },
        }
    )


def _as_asked(calibration: Mapping[str, Any] | None, request: QuantizeRequest) -> dict[str, Any] | None:
    """A record of calibration text with the file named as the request names it, not by the path that the subprocess was given."""
    return None if calibration is None else {**calibration, "file": str(request.calibration_file)}


def check_size(request: QuantizeRequest, folder: Path) -> dict[str, int]:
    """Bytes of the weights in `folder` and those that the planner reckons with; `QuantgateError` where they disagree."""
    recipe, source = request.recipe, request.model_dir / "config.json"
    sizes = geometry(read_json(source), str(source))
    predicted = predicted_weight_bytes(sizes, weight_scheme(recipe))
    # The planner serves what isn't quantized in 16 bits; a checkpoint keeps it as the source has it.
    embedding = read_tensors(request.model_dir)["model.embed_tokens.weight"]
    kept = other_tensors(sizes) if recipe.quantizes_weights else expected_shapes(sizes)
    predicted += (embedding.size_bytes // embedding.elements - 2) * sum(map(math.prod, kept.values()))
    stored = weight_bytes(folder)
    if abs(stored - predicted) > SIZE_TOLERANCE * predicted:
        raise QuantgateError(
            f"the checkpoint's weights take {stored:,} bytes, but the planner reckons with {predicted:,}: "
            f"{stored / predicted - 1:+.1%}, allowed is {SIZE_TOLERANCE:.0%}"
        )
    return {"weight_bytes": stored, "predicted_weight_bytes": predicted}


def check_request(request: QuantizeRequest, card: Card | None = None) -> None:
    """Everything that can be refused at once, before minutes of work. `card`: where it will compute, None for the CPU.

    Raises `UserInputError` for a model, texts or a recipe that can't be quantized, `EnvironmentUnfitError` without room for it.
    """
    check_model(request.model_dir)
    refuse_overlap(request.calibration_file, request.heldout_file)
    config_path = request.model_dir / "config.json"
    config = read_json(config_path)
    sizes = geometry(config, str(config_path))
    recipe = request.recipe
    for refusal in quantizer_refusals(sizes, Request.of(recipe, request.tensor_parallel)):
        raise UserInputError(f"{config_path}: {refusal}")
    room = room_for(sizes, recipe, on_cuda=card is not None, element_bytes=stored_element_bytes(config))
    refuse_without_room(room, request.out_dir, card)
