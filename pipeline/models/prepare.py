"""Put the model at hand: fetch it, bring it into one layout, make every environment read it the same, check it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.files import sha256_file
from pipeline.models.check import check_model, weight_files
from pipeline.models.child import run_module
from pipeline.models.normalize import normalize_folder
from pipeline.models.source import (
    HubSource,
    LocalSource,
    ModelSource,
    PackageSource,
    fetch_hub,
    fetch_package,
    local_folder,
)

# Small files that describe the model; weights are named by their index, anything else stays behind.
_DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")


def prepare(
    source: ModelSource,
    out_folder: str | Path,
    serve_python: str | Path,
    *,
    name: str | None = None,
    log_path: str | Path = "results/logs/prepare.log",
) -> dict[str, Any]:
    """Make `out_folder` hold the checked model and return its record.

    The folder appears whole or not at all; an older one is replaced only then. Record: name, kind, source,
    architecture, model_type, dtype, parameters, weight_bytes, sha256 (file name -> digest).
    Raises `UserInputError` for a folder that isn't a whole unquantized model of a supported architecture and
    `EnvironmentUnfitError` when the source can't be reached.
    """
    out = Path(out_folder)
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    # One level down, so that what a killed subprocess left half-written goes with the staging folder.
    model = staging / "model"
    staging.mkdir(parents=True)
    try:
        match source:
            case PackageSource():
                gguf = fetch_package(source)
                origin = {**source.model_dump(exclude_none=True), "sha256": sha256_file(gguf)}
                request = {"gguf": str(gguf), "out_dir": str(model.absolute())}
                origin["written_by"] = run_module(
                    serve_python, "pipeline.models.dequantize", request, log_path
                )
            case LocalSource():
                origin = source.model_dump()
                _adopt(local_folder(source), model)
            case HubSource():
                origin = source.model_dump()
                _adopt(fetch_hub(source), model)
        check_model(model)
        normalize_folder(model)
        facts = check_model(model)
        replace_folder(model, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {
        "name": name or default_name(source),
        "kind": source.kind,
        "source": origin,
        "architecture": facts.architecture,
        "model_type": facts.model_type,
        "dtype": facts.dtype,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "sha256": {path.name: sha256_file(path) for path in sorted(out.iterdir()) if path.is_file()},
    }


def default_name(source: ModelSource) -> str:
    """A short name for tables: the GGUF's stem, the folder's name or the repository's name."""
    match source:
        case PackageSource():
            return Path(source.file).stem.split(".")[0]
        case LocalSource():
            return local_folder(source).name
        case HubSource():
            return source.repo.split("/")[1]


def _adopt(folder: Path, staging: Path) -> None:
    """Fill `staging` from a Hugging Face folder without touching it.

    Descriptions are copied, because they will be rewritten. Weights never are, so they are hard links where
    the file system allows that: a second copy of a 15 GB model would be for nothing.
    """
    check_model(folder)
    staging.mkdir()
    for pattern in _DESCRIPTIONS:
        for path in folder.glob(pattern):
            shutil.copyfile(path, staging / path.name)
    for path in weight_files(folder):
        try:
            os.link(path.resolve(), staging / path.name)
        except OSError:
            shutil.copyfile(path, staging / path.name)


def replace_folder(staging: Path, out: Path) -> None:
    """Rename `staging` to `out`; an `out` that is already there is set aside first and removed after."""
    if out.exists() and not out.is_dir():
        raise UserInputError(f"{out}: is a file, but a model folder should be written there")
    aside = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if out.exists():
        os.replace(out, aside)
    os.replace(staging, out)
    shutil.rmtree(aside, ignore_errors=True)
