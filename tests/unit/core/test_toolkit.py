"""What a card's environment compiles with, and that each of its files has one owner."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.environments import toolkit
from pipeline.environments.build import SERVE_CUDA, locked
from pipeline.environments.owners import clashes, describe
from pipeline.errors import EnvironmentUnfitError
from tests.support.fake_toolkit import host_tools, packaged


def test_packages_get_the_layout_of_a_toolkit(tmp_path: Path) -> None:
    packaged(tmp_path, tmp_path / "calls")
    home = toolkit.make_cuda_home(tmp_path)
    assert home == toolkit.cuda_home(tmp_path)
    release = subprocess.run(
        [home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert "release 13.0" in release
    assert (home / "include/cuda.h").is_file() and (home / "nvvm/bin").is_dir()
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.13"
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", home / toolkit.STUB], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {"cuInit", "cuMemAlloc", "cuMemAlloc_v2"}
    dynamic = subprocess.run(
        ["readelf", "-d", home / toolkit.STUB], capture_output=True, text=True, check=True
    ).stdout
    assert "[libcuda.so.1]" in dynamic, "the driver's library takes its place"
    assert toolkit.make_cuda_home(tmp_path) == home, "again over what is there"


def test_an_environment_without_a_compiler_gets_no_toolkit(tmp_path: Path) -> None:
    assert toolkit.make_cuda_home(tmp_path) is None
    assert not toolkit.cuda_home(tmp_path).exists()


def test_the_c_compiler_is_tritons(tmp_path: Path) -> None:
    both = host_tools(tmp_path / "both", ("gcc", "g++"))
    (both / "clang").symlink_to("g++")
    assert toolkit.c_compiler({"PATH": str(both)}) == str(both / "gcc")
    (both / "gcc").unlink()
    assert toolkit.c_compiler({"PATH": str(both)}) == str(both / "clang")
    assert toolkit.c_compiler({"PATH": str(both), "CC": "g++"}) == str(both / "g++")
    for without in ({"PATH": str(tmp_path)}, {"PATH": str(both), "CC": "icc"}):
        with pytest.raises(EnvironmentUnfitError, match=r"no C compiler .*\(apt: build-essential\)"):
            toolkit.c_compiler(without)


def test_the_lock_brings_the_compiler_of_its_torchs_cuda() -> None:
    """cuda-toolkit pins the packages of one CUDA release, and torch pins cuda-toolkit."""
    lock = locked(SERVE_CUDA)
    release = lock["cuda-toolkit"].split(".")[:2]
    for package in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-cccl",
        "nvidia-cuda-runtime",
    ):
        assert lock[package].split(".")[:2] == release, package
    assert "ninja" in lock
    assert lock["cuda-python"].split(".")[:2] == lock["cuda-bindings"].split(".")[:2], "a mere name for it"


def record(environment: Path, distribution: str, rows: str) -> None:
    folder = environment / f"lib/python3.11/site-packages/{distribution}.dist-info"
    folder.mkdir(parents=True)
    (folder / "RECORD").write_text(rows)


def test_a_file_of_two_packages_with_two_contents_is_found(tmp_path: Path) -> None:
    record(tmp_path, "cuda_bindings-13.5.0", "cuda/bindings/a.py,sha256=A,9\ncuda/b.py,sha256=B,9\n")
    record(tmp_path, "cuda_python-12.6.2", "cuda/bindings/a.py,sha256=X,9\ncuda/__pycache__/b.pyc,,\n")
    record(tmp_path, "mlflow-3", "mlflow/x.py,sha256=M,1\nbuild_backend.py,sha256=1,1\n\n")
    record(tmp_path, "mlflow_skinny-3", "mlflow/x.py,sha256=M,1\nbuild_backend.py,sha256=2,1\n")
    found = clashes(tmp_path)
    assert found == {"cuda/bindings/a.py": ("cuda_bindings-13.5.0", "cuda_python-12.6.2")}
    assert describe(found) == (
        "cuda_bindings-13.5.0 and cuda_python-12.6.2 both bring 1 files, for example cuda/bindings/a.py"
    )
