"""The MLflow UI over our own store, for this machine only."""

from __future__ import annotations

import socket
import sys

from pipeline.errors import EnvironmentUnfitError
from pipeline.tracking.store import QUIET, artifact_root, database_file

HOST = "127.0.0.1"


def server_command(tracking_uri: str, port: int) -> list[str]:
    """Command that serves the UI on 127.0.0.1:`port`; its settings are part of it, so it can be exec'ed as it is.

    Raises `EnvironmentUnfitError` when nothing was tracked yet or when the port is taken.
    """
    database, artifacts = database_file(tracking_uri), artifact_root(tracking_uri)
    if database is None or artifacts is None:
        raise EnvironmentUnfitError(f"the runs are on the MLflow server {tracking_uri}; open that instead")
    if not database.is_file():
        raise EnvironmentUnfitError(f"{database}: no runs are tracked yet; `dvc repro` writes them")
    refuse_busy_port(port)
    # The server's job runner (evaluation and optimization jobs) would be four more processes that nothing here uses.
    settings = {**QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return [
        "/usr/bin/env",
        *(f"{key}={value}" for key, value in settings.items()),
        *(sys.executable, "-m", "mlflow", "server"),
        *("--backend-store-uri", f"sqlite:///{database}"),
        *("--artifacts-destination", artifacts.as_uri()),
        *("--host", HOST, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"),
    ]


def refuse_busy_port(port: int) -> None:
    """`EnvironmentUnfitError` when something listens on 127.0.0.1:`port` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EnvironmentUnfitError(
                f"port {port} on {HOST} is taken ({error.strerror}); choose another one"
            ) from None
