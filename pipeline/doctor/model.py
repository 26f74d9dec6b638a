"""The model: are its weights at hand, or can they be had?"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import requests

from pipeline.doctor.check import Check, ok, unfit, warn
from pipeline.files import read_json
from pipeline.models.check import check_model
from pipeline.models.source import hub_folder, local_folder, package_file
from pipeline.runs import RUNS
from pipeline.settings import Settings
from pipeline.settings.schema import HubSource, LocalSource, PackageSource

TIMEOUT_S = 10.0


def check_source(settings: Settings) -> Check:
    """Whether the stage `prepare` will get the model."""
    match settings.model.source:
        case LocalSource() as source:
            facts = check_model(local_folder(source))
            return ok(
                "model",
                f"{source.path}: {facts.architecture}, {facts.parameters / 1e9:.2f} billion parameters",
            )
        case PackageSource() as source:
            if package_file(source).is_file():
                return ok("model", f"{source.package} is at hand")
            return warn(
                "model",
                f"{source.package} isn't downloaded yet",
                "the stage prepare gets it from the package index",
            )
        case HubSource() as source:
            return _hub(source)


def model_folder(settings: Settings) -> Path | None:
    """The folder of a model that is at hand: prepared by an earlier run, the user's own, or the hub's cache."""
    source = settings.model.source
    places: list[Path | None] = [RUNS / settings.profile / "weights/bf16"]
    if isinstance(source, LocalSource):
        places.append(Path(source.path).expanduser())
    if isinstance(source, HubSource):
        places.append(hub_folder(source))
    return next((folder for folder in places if folder and (folder / "config.json").is_file()), None)


def local_config(settings: Settings) -> dict[str, Any] | None:
    """The config.json of a model that is at hand."""
    folder = model_folder(settings)
    return None if folder is None else dict(read_json(folder / "config.json"))


def _hub(source: HubSource) -> Check:
    name = f"{source.repo}@{source.revision[:12]}"
    folder = hub_folder(source)
    if folder is not None:
        facts = check_model(folder)
        return ok(
            "model", f"{name} is in the hub's cache, whole: {facts.parameters / 1e9:.2f} billion parameters"
        )
    elsewhere = "download it where the hub is reachable and set the model's source to {kind: local, path: …}, or HF_ENDPOINT to a mirror"
    reason = why_no_hub()
    if reason is None:
        return ok("model", f"{name} isn't in the hub's cache yet; the hub is reachable")
    return unfit("model", f"{name} isn't in the hub's cache, and {reason}", elsewhere)


@functools.cache
def why_no_hub() -> str | None:
    """Why nothing can be had from the hub now; None when it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return "HF_HUB_OFFLINE is set"
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        requests.head(endpoint, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        return f"{endpoint} doesn't answer ({type(error).__name__})"
    return None
