"""A server on a card: its lease, what the engine is told, and who held memory before and after the start.

The launcher, guard and processes are real, the mock stands in the engine's place, and NVML answers from a recording to which
the engine's real pids are added while it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import EnvironmentUnfitError
from pipeline.gpu import NoDriver
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.lease import engine_leases
from pipeline.serving.server import serve
from tests.support.mock_vllm import fake_python
from tests.support.patience import PATIENCE_S
from tests.support.recorded_nvml import DESKTOP, MIB, SECOND_UUID, UUID, RecordedNvml, rtx_4090


class WithEngine(RecordedNvml):
    """The recording, with whoever runs the mock of `folder` holding 20,000 MiB, and the desktop `grown` by so many MiB."""

    def __init__(self, folder: Path, *cards: dict[str, Any], grown: int = 0, hidden: bool = False) -> None:
        super().__init__(*cards)
        self.folder, self.grown, self.hidden = folder, grown, hidden

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict[str, Any]) -> list[Any]:
        processes = dict(device["processes"])
        for process in psutil.process_iter(["cmdline", "environ"]):
            marked = (process.info["environ"] or {}).get("QUANTGATE_TEST_MARK") == str(self.folder)
            if marked and "tests.support.mock_vllm" in (process.info["cmdline"] or []):
                name, size = processes.get(2101, ("Xorg", 0))
                processes[2101] = (name, size + self.grown)
                processes[4_000_000 if self.hidden else process.pid] = ("python", 20_000)
        return super().nvmlDeviceGetComputeRunningProcesses({"processes": processes})


def spec(**changes: Any) -> ServeSpec:
    values: dict[str, Any] = {
        "engine_version": locked_engine()[1], "model_dir": Path("no-such-model"), "served_name": "demo", "target": "cuda", "max_model_len": 512,
        "max_num_seqs": 32, "gpu_memory_utilization": 0.92,
    }  # fmt: skip
    return ServeSpec(**{**values, **changes})


def start(folder: Path, nvml: RecordedNvml, wanted: ServeSpec | None = None, **options: Any) -> Any:
    python = fake_python(folder)
    return serve(
        wanted or spec(),
        python,
        folder / "serve.log",
        PATIENCE_S,
        lease_folder=folder / "lease",
        nvml=nvml,
        **options,
    )


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine inherits a mark by which its processes are found, and no selection of cards."""
    monkeypatch.setenv("QUANTGATE_TEST_MARK", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_others_are_told_apart_from_the_engine(tmp_path: Path) -> None:
    with start(tmp_path, WithEngine(tmp_path, rtx_4090(processes=DESKTOP), grown=150)) as server:
        [memory] = server.gpu_memory
        environment = psutil.Process(server.pid).environ()
    assert memory.held_before_bytes == 1_400 * MIB
    assert [p.name for p in memory.others_before] == ["browser", "Xorg", "gnome-shell"]
    assert memory.others_after is not None
    assert {p.pid for p in memory.others_after} == set(DESKTOP)
    assert memory.changed_bytes == 150 * MIB
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_an_engine_under_unknown_pids_leaves_the_change_unknown(tmp_path: Path) -> None:
    with start(tmp_path, WithEngine(tmp_path, rtx_4090(processes=DESKTOP), hidden=True)) as server:
        [memory] = server.gpu_memory
    assert memory.held_before_bytes == 1_400 * MIB
    assert (memory.others_after, memory.changed_bytes) == (None, None)


def test_memory_that_the_driver_does_not_tell_is_unknown_not_zero(tmp_path: Path) -> None:
    card = rtx_4090(processes={7: ("/usr/bin/wsl-thing", None)})
    with start(tmp_path, WithEngine(tmp_path, card)) as server:
        [memory] = server.gpu_memory
    assert memory.others_after is not None
    assert memory.changed_bytes is None


def test_the_lease_is_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = WithEngine(tmp_path, rtx_4090(), rtx_4090(SECOND_UUID))
    with engine_leases([UUID], tmp_path / "lease", timeout_s=0.0):
        with pytest.raises(EnvironmentUnfitError, match=f"another engine .*engine-{UUID}.lock"):
            start(tmp_path, both, lease_timeout_s=0.0).__enter__()
        with pytest.raises(EnvironmentUnfitError, match="another engine"):
            start(tmp_path, both, spec(tensor_parallel=2), lease_timeout_s=0.0).__enter__()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with start(tmp_path, both, lease_timeout_s=0.0) as server:
            assert [gpu.uuid for gpu in server.gpus] == [SECOND_UUID]
            assert psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] == "1"
        with engine_leases([], tmp_path / "lease", timeout_s=0.0):
            pass  # a CPU's engine is no card's
    assert json.loads((tmp_path / "lease" / f"engine-{UUID}.lock").read_text())["pid"]


def test_no_driver_and_too_few_cards_are_said_before_anything_starts(tmp_path: Path) -> None:
    import pynvml

    with pytest.raises(NoDriver, match="no NVIDIA driver"):
        start(tmp_path, RecordedNvml(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)).__enter__()
    with pytest.raises(EnvironmentUnfitError, match="2 cards are needed, and 1 visible"):
        start(tmp_path, RecordedNvml(rtx_4090()), spec(tensor_parallel=2)).__enter__()
    assert not (tmp_path / "serve.log").exists()


def test_a_cpu_has_no_cards(tmp_path: Path) -> None:
    on_cpu = spec(target="cpu", gpu_memory_utilization=None, kv_cache_memory_bytes=2**26)
    with start(tmp_path, RecordedNvml(rtx_4090()), on_cpu) as server:
        assert (server.gpus, server.gpu_memory) == ((), [])
        assert "CUDA_DEVICE_ORDER" not in psutil.Process(server.pid).environ()
