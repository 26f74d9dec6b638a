"""Reading a server's pages: a connection that is closed under us is tried again, a server that is gone is dying."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.serving.command import ServeSpec
from pipeline.serving.server import Server

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def server_at(port: int) -> Server:
    spec = ServeSpec(
        engine_version="0.32.0",
        model_dir=Path("m"), served_name="m", target="cpu", max_model_len=16, max_num_seqs=1, kv_cache_memory_bytes=1
    )  # fmt: skip
    return Server(spec, [], port, Path("serve.log"))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def answer(listener: socket.socket, closed_first: int) -> None:
    """Close so many connections without a word, then answer one request."""
    for number in range(closed_first + 1):
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            if number == closed_first:
                connection.sendall(ANSWER)


@pytest.mark.parametrize(("closed_first", "health"), [(0, "healthy"), (2, "healthy"), (3, "dying")])
def test_a_connection_closed_under_us_is_tried_again(
    listener: socket.socket, closed_first: int, health: str
) -> None:
    thread = threading.Thread(target=answer, args=(listener, closed_first), daemon=True)
    thread.start()
    assert server_at(listener.getsockname()[1])._health(5.0) == health


def test_nobody_listening_is_dying(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert server_at(port)._health(5.0) == "dying"
