"""What a card's engine compiles with is asked for before anything is fetched, in one sentence each."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from pipeline.doctor import toolchain
from pipeline.doctor.check import Check
from pipeline.environments import build
from pipeline.environments.toolkit import NO_C_COMPILER, NO_CXX, NO_NINJA, NO_NVCC, NO_PYTHON_H
from pipeline.gpu import read_gpus
from pipeline.settings import Settings, load_settings
from tests.support.fake_toolkit import environment_with_toolkit, host_tools
from tests.support.recorded_nvml import RecordedNvml, rtx_4090

ROOT = Path(__file__).resolve().parents[3]
TRITON_ONLY = "variant_names=[bf16,bf16-again,awq,awq-kv-per-token-head]"


@functools.cache
def settings(*overrides: str) -> Settings:
    return load_settings(["profile=rtx4090", *overrides], ROOT)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment for a card, finished, with a toolkit, ninja and a python of its own."""
    folder = tmp_path / "serve-cuda"
    ninja = host_tools(tmp_path / "real", ("sh",)) / "sh"  # only looked for, never called
    python = environment_with_toolkit(folder, ninja, tmp_path / "calls")
    python.symlink_to(build.base_interpreter())
    (folder / build.MARKER).write_text("")
    monkeypatch.setattr(toolchain, "environment_folder", lambda _: folder)
    return folder


def checks(tools: Path, wanted: Settings | None = None, **variables: str) -> dict[str, Check]:
    gpus = read_gpus(RecordedNvml(rtx_4090()))
    found = toolchain.check_toolchain(wanted or settings(), gpus, {"PATH": str(tools), **variables})
    return {check.name: check for check in found}


def says(check: Check, sentence: str) -> bool:
    return (check.status, f"{check.found}: {check.fix}", check.exit_code) == ("fail", sentence, 3)


def test_all_there(environment: Path, tmp_path: Path) -> None:
    found = checks(host_tools(tmp_path / "tools"))
    assert {check.status for check in found.values()} == {"ok"}
    assert found["nvcc and ninja"].found == f"nvcc 13.0 in {environment}/cuda, {environment}/bin/ninja"
    assert found["kernels compiled at start"].found == (
        "FlashInfer's in bf16-fp8kv-calibrated, awq-fp8kv, awq-fp8kv-calibrated; Triton's in every variant"
    )


def test_a_bare_machine_is_told_each_thing_that_it_lacks(environment: Path, tmp_path: Path) -> None:
    found = checks(host_tools(tmp_path / "tools", ()))
    assert says(found["C compiler"], NO_C_COMPILER)
    assert says(found["C++ compiler"], NO_CXX)
    (environment / "bin/ninja").unlink()
    assert says(checks(tmp_path / "tools")["nvcc and ninja"], NO_NINJA)
    (environment / "cuda/bin").unlink()
    assert says(checks(tmp_path / "tools")["nvcc and ninja"], NO_NVCC)


def test_headers_and_a_working_compiler(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = host_tools(tmp_path / "tools")
    monkeypatch.setattr(toolchain, "INCLUDE_FOLDER", f"print({str(tmp_path)!r})")
    assert says(checks(tools)["C compiler"], NO_PYTHON_H)
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "environment_folder", lambda _: environment)
    (tools / "broken").write_text("#!/bin/sh\necho 'no libc here' >&2; exit 1\n")
    (tools / "broken").chmod(0o755)
    broken = checks(tools, CC="broken")["C compiler"]
    assert broken.status == "fail" and "no libc here" in broken.found


def test_a_compiler_that_nvcc_does_not_know(environment: Path, tmp_path: Path) -> None:
    tools = host_tools(tmp_path / "tools")
    (tools / "g++").unlink()
    (tools / "g++").write_text("#!/bin/sh\necho 17.1.0\n")
    (tools / "g++").chmod(0o755)
    found = checks(tools)["C++ compiler"]
    assert (found.status, found.exit_code) == ("fail", 3)
    assert found.found == "g++ is 17.1.0, and the environment's nvcc takes up to 15"


def test_only_what_the_variants_need_is_asked_for(environment: Path, tmp_path: Path) -> None:
    tools = host_tools(tmp_path / "tools", ("as", "gcc", "ld"))
    found = checks(tools, settings(TRITON_ONLY))
    assert list(found) == ["C compiler", "kernels compiled at start"]
    assert found["kernels compiled at start"].found == "Triton's, in every variant"
    named = settings(TRITON_ONLY, "+server.environment.VLLM_USE_FLASHINFER_SAMPLER='1'")
    assert says(checks(tools, named)["C++ compiler"], NO_CXX)


def test_before_the_environment_is_built_its_lock_says_what_it_will_bring(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(toolchain, "environment_folder", lambda _: tmp_path / "not-there")
    found = checks(host_tools(tmp_path / "tools"))
    assert found["nvcc and ninja"].found.startswith("serve-cuda brings nvcc 13.0.")
    monkeypatch.setattr(toolchain, "locked", lambda _: {"ninja": "1"})
    assert says(checks(tmp_path / "tools")["nvcc and ninja"], NO_NVCC)


def test_a_cpus_engine_needs_a_cxx_compiler_where_it_compiles(tmp_path: Path) -> None:
    assert checks(host_tools(tmp_path / "none", ()), load_settings(["profile=demo"], ROOT)) == {}
    demo = load_settings(["profile=demo", "server.enforce_eager=false"], ROOT)
    assert [check.status for check in checks(host_tools(tmp_path / "tools"), demo).values()] == ["ok"]
    found = checks(tmp_path / "none", demo)
    assert list(found) == ["C++ compiler"]
    assert found["C++ compiler"].status == "fail"
    assert "apt: build-essential" in found["C++ compiler"].fix
