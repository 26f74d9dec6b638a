"""A card's engine compiles with its own environment's tools, and with nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.serving.command import build_environment
from tests.unit.serving.test_command import spec


def cuda(**changes: object):  # type: ignore[no-untyped-def]
    return spec(target="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.92, **changes)


def test_the_environments_own_tools_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "env/bin").mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    python.symlink_to("/usr/bin/env")  # as a virtual environment's leads out of it
    inherited = {
        "PATH": "/usr/local/cuda/bin:/bin", "CUDA_HOME": "/usr/local/cuda", "CUDA_PATH": "/usr/local/cuda",
        "FLASHINFER_NVCC": "/other/nvcc", "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0",
        "NVCC_APPEND_FLAGS": "-g", "CC": "gcc-12", "MAX_JOBS": "4",
    }  # fmt: skip
    found = build_environment(cuda(), inherited, python=python)
    assert found["PATH"] == f"{tmp_path}/env/bin:/usr/local/cuda/bin:/bin"
    assert found["CUDA_HOME"] == f"{tmp_path}/env/cuda"
    assert found["FLASHINFER_WORKSPACE_BASE"] == f"{tmp_path}/cache/quantgate/flashinfer"
    assert [name for name in found if name.startswith(("FLASHINFER", "NVCC", "CUDA_PATH"))] == [
        "FLASHINFER_WORKSPACE_BASE"
    ]
    assert (found["CC"], found["MAX_JOBS"]) == ("gcc-12", "4")
    assert "CUDA_HOME" not in build_environment(spec(), {"PATH": "/bin"}, python=python), (
        "a CPU's is left alone"
    )


def test_flashinfers_sampler_is_off_unless_it_is_named() -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    assert build_environment(cuda(), {})[name] == "0"
    assert build_environment(cuda(environment={name: "1"}), {})[name] == "1"
    with pytest.raises(UserInputError, match=f"has {name}, which may change"):
        build_environment(cuda(), {name: "1"})
    assert name not in build_environment(spec(), {})


def test_the_engine_waits_for_itself_as_long_as_we_wait_for_it() -> None:
    """By itself it gives up after 600 s, whatever server.startup_timeout_s says."""
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    for one in (spec(), cuda()):
        assert build_environment(one, {name: "60"}, startup_timeout_s=899.5)[name] == "900"
    with pytest.raises(UserInputError, match=f"{name} can't be set here"):
        spec(environment={name: "60"})
