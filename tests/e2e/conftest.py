"""What the end-to-end tests share: the real model, prepared once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.models.prepare import prepare
from pipeline.settings import load_settings
from tests.support.environments import environment_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def own_engine_lease(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An engine lease of the tests' own: at the machine's they would wait an hour for another engine of this user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def prepared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as the stage `prepare` leaves it."""
    folder = tmp_path_factory.mktemp("model") / "bf16"
    source = load_settings(["profile=demo"], ROOT).model.source
    prepare(source, folder, environment_python("serve"), log_path=folder.parent / "prepare.log")
    return folder
