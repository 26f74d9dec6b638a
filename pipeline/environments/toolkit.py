"""A CUDA toolkit's folder inside an environment for a card, made of the compiler packages that its lock brings.

FlashInfer compiles against a toolkit as NVIDIA's installer lays it out (`$CUDA_HOME/bin/nvcc`, `include`, `lib64/libcudart.so`,
`lib64/stubs/libcuda.so`; flashinfer 0.7.0, jit/cpp_ext.py: generate_ninja_build_for_op). The packages lay it out otherwise: all of it
below `nvidia/cu13`, libraries in `lib` and with their major version in the name only, no stub of the driver's library. So a folder
of links is put in front of them, and the stub is made: empty functions under the names in cuda.h, of which the linker wants no more.
The driver's own library takes their place when a module is loaded.

Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import EnvironmentUnfitError

FOLDER = "cuda"
STUB = Path("lib64", "stubs", "libcuda.so")
C_COMPILERS = ("gcc", "clang")
"""What Triton looks for, in its order, where CC isn't set (triton 3.7.1, runtime/build.py: _build)."""
NO_C_COMPILER = "no C compiler is on the engine's PATH (gcc or clang), which Triton builds its launchers with: install one (apt: build-essential)"
NO_CXX = "no C++ compiler is on the engine's PATH (g++), which nvcc and FlashInfer need: install one (apt: build-essential)"
NO_PYTHON_H = "Python.h is missing, which Triton's launchers are built with: install your Python's headers (apt: python3.11-dev)"
NO_NVCC = (
    "nvcc isn't where the engine looks for it, and FlashInfer compiles its kernels with it: remove the environment serve-cuda and run "
    "`make environments`, which brings one"
)
NO_NINJA = (
    "ninja isn't on the engine's PATH, and FlashInfer compiles its kernels with it: remove the environment serve-cuda and run "
    "`make environments`, which brings one"
)


def cuda_home(environment: Path) -> Path:
    """Where the toolkit of an environment stands; its `bin/nvcc` is there only if the lock brings a compiler."""
    return environment / FOLDER


def packaged_toolkit(environment: Path) -> Path | None:
    """The folder in which NVIDIA's packages put their compiler; None where the environment has none."""
    found = sorted((environment / "lib").glob("python3.*/site-packages/nvidia/cu*/bin/nvcc"))
    return found[-1].parents[1] if found else None


def c_compiler(variables: Mapping[str, str]) -> str:
    """The C compiler that Triton would take with these variables; `EnvironmentUnfitError` without one."""
    wanted = (variables["CC"],) if variables.get("CC") else C_COMPILERS
    path = variables.get("PATH", os.defpath)
    found = next(filter(None, (shutil.which(name, path=path) for name in wanted)), None)
    if found is None:
        raise EnvironmentUnfitError(NO_C_COMPILER)
    return found


def make_cuda_home(environment: Path) -> Path | None:
    """Make the toolkit's folder anew; returns it, or None where no package brings a compiler.

    `EnvironmentUnfitError` without a C compiler, or where it can't make the stub.
    """
    packaged = packaged_toolkit(environment)
    if packaged is None:
        return None
    home = cuda_home(environment)
    shutil.rmtree(home, ignore_errors=True)
    (home / STUB).parent.mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (home / name).symlink_to(packaged / name)
    for library in sorted((packaged / "lib").iterdir()):
        plain = re.sub(r"\.so\.[\d.]+$", ".so", library.name)
        for name in {library.name, plain}:
            link = home / "lib64" / name
            if not link.is_symlink():
                link.symlink_to(library)
    _make_stub(home / STUB, packaged / "include" / "cuda.h")
    return home


def _make_stub(target: Path, header: Path) -> None:
    text = header.read_text(encoding="utf-8")
    declared = re.findall(r"\bcu[A-Z]\w+(?=\s*\()", text)
    renamed = re.findall(r"^#\s*define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+)\s*$", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "stub.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted({*declared, *renamed})))
        command = [
            c_compiler(os.environ),
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-w",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(target),
        ]
        result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EnvironmentUnfitError(f"no stub of libcuda.so could be made: {result.stderr.strip()[-300:]}")
