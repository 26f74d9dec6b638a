"""A quantization that is killed while it writes leaves nothing that a later stage could take for whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.models.check import check_model
from pipeline.quantize import base
from pipeline.quantize.base import quantize
from tests.support.patience import wait_until
from tests.support.processes import is_running
from tests.support.quantize_requests import tiny_request
from tests.support.tiny_models import LLAMA, write_model

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "over an earlier result"])
def test_sigkill_leaves_only_what_was_whole(
    tmp_path: Path, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tiny_request(tmp_path)
    if earlier:
        write_model(request.out_dir, LLAMA)
    asked, half, partial = tmp_path / "request.json", tmp_path / "half", tmp_path / ".out.partial"
    asked.write_text(request.model_dump_json())
    process = subprocess.Popen([sys.executable, "-m", "tests.support.half_backend", str(asked)], cwd=ROOT)
    try:
        child = int(wait_until(lambda: half.read_text() if half.is_file() else ""))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not is_running(child))  # it dies with its parent, and writes no more
    assert partial.is_dir() and request.out_dir.is_dir() == earlier
    with pytest.raises(UserInputError, match="describes"):
        check_model(partial)
    if earlier:
        check_model(request.out_dir)

    def finds_nothing_of_the_killed_run(*_: object, **__: object) -> dict[str, object]:
        assert not partial.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "run_module", finds_nothing_of_the_killed_run)
    with pytest.raises(KeyboardInterrupt):
        quantize(request, sys.executable, log_path=tmp_path / "log")
    assert not partial.exists() and os.path.isdir(request.out_dir) == earlier
