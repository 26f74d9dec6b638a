"""The command that serves the UI."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.errors import EnvironmentUnfitError
from pipeline.tracking import server_command


@pytest.fixture
def uri(tmp_path: Path) -> str:
    (tmp_path / "mlflow.db").touch()
    return f"sqlite:///{tmp_path}/mlflow.db"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_it_serves_this_machine_only_and_sends_no_telemetry(uri: str, tmp_path: Path) -> None:
    port = free_port()
    command = server_command(uri, port)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == str(port)
    assert command[command.index("--backend-store-uri") + 1] == uri
    assert command[command.index("--artifacts-destination") + 1] == (tmp_path / "artifacts").as_uri()
    assert "MLFLOW_DISABLE_TELEMETRY=true" in command


def test_a_busy_port_is_named(uri: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnfitError, match=str(port)):
            server_command(uri, port)


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="dvc repro"):
        server_command(f"sqlite:///{tmp_path}/mlflow.db", free_port())
