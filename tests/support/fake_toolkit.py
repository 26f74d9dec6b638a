"""An environment with NVIDIA's compiler packages as they lie in site-packages, but an nvcc that only says that it was called.

Its objects are empty and its libraries stand-ins, so that what FlashInfer makes with it links in a second; ninja is the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from pipeline.environments.toolkit import make_cuda_home

NVCC = """#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
echo "$0 $*" >> "{calls}"
while [ $# -gt 0 ]; do case "$1" in -o) out=$2;; -MF) deps=$2;; esac; shift; done
echo "$out:" > "$deps"
exec gcc -c -x c /dev/null -o "$out"
"""
HOST_TOOLS = ("as", "c++", "cat", "g++", "gcc", "ld", "sh", "which")


def host_tools(folder: Path, names: tuple[str, ...] = HOST_TOOLS) -> Path:
    """A folder for the PATH with links to these tools of the machine and nothing else."""
    folder.mkdir(parents=True)
    for name in names:
        found = shutil.which(name)
        assert found is not None, f"the tests need {name}"
        (folder / name).symlink_to(found)
    return folder


def packaged(environment: Path, calls: Path) -> Path:
    """Lay the packages out; returns their folder."""
    folder = environment / "lib/python3.11/site-packages/nvidia/cu13"
    for name in ("bin", "include", "lib", "nvvm/bin"):
        (folder / name).mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(calls=calls))
    nvcc.chmod(0o755)
    (folder / "include" / "cuda.h").write_text(
        "#define cuMemAlloc cuMemAlloc_v2\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
        "CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);\n"
    )
    library = folder / "lib" / "libcudart.so.13"
    subprocess.run(
        ["gcc", "-shared", "-x", "c", os.devnull, "-o", library, "-Wl,-soname,libcudart.so.13"], check=True
    )
    return folder


def environment_with_toolkit(environment: Path, ninja: Path, calls: Path) -> Path:
    """A whole one, its toolkit's folder made as a build makes it; returns the path of its python."""
    packaged(environment, calls)
    (environment / "bin").mkdir()
    (environment / "bin" / "ninja").symlink_to(ninja)
    make_cuda_home(environment)
    return environment / "bin" / "python"
