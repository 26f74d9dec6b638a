"""What the end-to-end tests share: the real model and the tiny ones, prepared once a session, however many workers it has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from pipeline.models.prepare import prepare
from pipeline.settings import load_settings
from pipeline.settings.schema import LocalSource, ModelSource
from tests.support.environments import environment_python
from tests.support.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def own_engine_lease(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An engine lease of the tests' own: at the machine's they would wait an hour for another engine of this user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all workers of a session: theirs lie below the session's own."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def _prepared_once(source: ModelSource, folder: Path) -> Path:
    """The source's model as the stage `prepare` leaves it; a worker that comes second waits for the first."""
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            prepare(source, folder, environment_python("serve"), log_path=folder.with_suffix(".log"))
    return folder


@pytest.fixture(scope="session")
def prepared_model(shared_folder: Path) -> Path:
    """The demo's model. Read only: others read it too."""
    return _prepared_once(load_settings(["profile=demo"], ROOT).model.source, shared_folder / "demo-model")


@pytest.fixture(scope="session")
def tiny_model(
    shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], Path]:
    """A model of random weights by its config, prepared once for each. Read only, like the demo's."""

    def made(config: dict[str, Any]) -> Path:
        name = f"tiny-{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]}"
        origin = write_model(tmp_path_factory.mktemp(name), config)
        return _prepared_once(LocalSource(path=str(origin)), shared_folder / name)

    return made
