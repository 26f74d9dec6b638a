"""Where the runs live: an SQLite file and an artifact folder beside it, opened quietly.

mlflow's telemetry is switched off before mlflow is imported, and its progress chatter is not ours to show.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from pipeline.errors import EnvironmentUnfitError, UserInputError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

TRACKING_URI = "sqlite:///mlruns/mlflow.db"
"""Relative to the working directory, as everything in this repository."""
ARTIFACT_ROOT = Path("mlruns/artifacts")

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_EXPERIMENT_TAGS = {
    # Opens the experiment on its table of runs; mlflow 3.17's UI otherwise takes it for one about prompts and traces.
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": "One comparison run per set of results, its variants below it. Filter by tags.decision = 'GO'.",
}
_SQLITE = "sqlite:///"


def database_file(tracking_uri: str) -> Path | None:
    """The SQLite file of a tracking URI as an absolute path; None when the URI names a server."""
    if not tracking_uri.startswith(_SQLITE):
        return None
    return Path(tracking_uri.removeprefix(_SQLITE)).absolute()


def artifact_root(tracking_uri: str) -> Path | None:
    """The folder `artifacts` beside the SQLite file; None when a server keeps the artifacts."""
    database = database_file(tracking_uri)
    return None if database is None else database.parent / "artifacts"


def open_client(tracking_uri: str) -> MlflowClient:
    """A client of the store; the SQLite file and its folder are made when they don't exist yet.

    Raises `UserInputError` for a URI that is neither SQLite nor a server.
    """
    database = database_file(tracking_uri)
    if database is None and not tracking_uri.startswith(("http://", "https://")):
        raise UserInputError(
            f"tracking_uri={tracking_uri!r}; allowed are sqlite:///FILE and an MLflow server's http(s) address"
        )
    os.environ.update(QUIET)
    # Set before the import: its database migrations are logged step by step when the file is new.
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if database is None:
        return mlflow.MlflowClient(tracking_uri=tracking_uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    return mlflow.MlflowClient(tracking_uri=f"{_SQLITE}{database}")


@contextmanager
def usable_store(tracking_uri: str) -> Iterator[None]:
    """Inside, what mlflow and its database say against the store becomes one `EnvironmentUnfitError`.

    Also keeps the deprecation warnings that mlflow's own modules cause off the terminal: nobody here can act on them.
    """
    os.environ.update(QUIET)
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"mlflow\.")
        try:
            yield
        except (MlflowException, SQLAlchemyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise EnvironmentUnfitError(f"MLflow at {tracking_uri} can't be used: {reason}") from error


def open_experiment(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    """The id of the experiment called `name`, made when it doesn't exist.

    An experiment remembers where its artifacts are as an absolute path. When the repository has moved since, the old
    one is renamed out of the way: writing on would put new artifacts where nobody looks.
    """
    wanted = None if artifacts is None else artifacts.as_uri()
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if found is not None and wanted is not None and found.artifact_location != wanted:
        client.rename_experiment(found.experiment_id, f"{name} (before the move, {found.experiment_id})")
        found = None
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=wanted, tags=_EXPERIMENT_TAGS))


def delete_run(client: MlflowClient, run: Run, artifacts: Path | None) -> None:
    """Delete a run, and its artifacts where they are ours on this machine."""
    client.delete_run(run.info.run_id)
    location = urlparse(run.info.artifact_uri)
    folder = Path(unquote(location.path))
    if artifacts is not None and location.scheme in ("", "file") and artifacts in folder.parents:
        shutil.rmtree(folder.parent if folder.name == "artifacts" else folder, ignore_errors=True)
