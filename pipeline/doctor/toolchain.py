"""What a card's engine compiles with at its start: is it there, as the engine will see it?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.compatibility import Engine, attention_backends
from pipeline.compatibility.compilers import NEWEST_GCC, Need, compiled_modules, compiler_needs
from pipeline.doctor.check import Check, ok, unfit
from pipeline.doctor.scenario import CAPABILITIES
from pipeline.environments.build import SERVE_CUDA, base_interpreter, environment_folder, is_complete, locked
from pipeline.environments.toolkit import (
    NO_CXX,
    NO_NINJA,
    NO_NVCC,
    NO_PYTHON_H,
    c_compiler,
)
from pipeline.errors import EnvironmentUnfitError
from pipeline.gpu import lowest_capability
from pipeline.planning.scenario import geometry_of, head_sizes
from pipeline.results import Gpu
from pipeline.serving.compiling import compile_environment
from pipeline.settings import Settings, VariantSettings

WAIT_S = 60.0
HEAD_DIM = 128  # of a model whose geometry isn't known yet; Llama, Mistral, Qwen and Gemma have it
INCLUDE_FOLDER = (
    # As Triton asks for it (triton 3.7.1, runtime/build.py: _build).
    "import sysconfig; s = sysconfig.get_default_scheme(); "
    "print(sysconfig.get_paths('posix_prefix' if s == 'posix_local' else s)['include'])"
)


def check_toolchain(
    settings: Settings, gpus: list[Gpu], variables: Mapping[str, str] | None = None
) -> Iterator[Check]:
    """Compilers, headers and build tools that the profile's variants need. `variables`: the shell's."""
    inherited = os.environ if variables is None else variables
    if settings.device.kind == "cpu":
        if (
            not settings.server.enforce_eager
        ):  # eager as the demo is, nothing is compiled (serving/command.py)
            yield _cpu_compiler(inherited)
        return
    taken = {
        variant.name: (taken_backend(settings, variant, gpus), variant)
        for variant in settings.variants.values()
    }
    pairs = [(backend, variant.kv_cache_dtype) for backend, variant in taken.values()]
    named = settings.server.environment
    needs = compiler_needs(pairs, named)
    folder = environment_folder(SERVE_CUDA)
    engine = compile_environment(inherited, folder / "bin" / "python")
    yield _c_compiler(engine, folder)
    if needs == "flashinfer":
        yield _cxx_compiler(engine)
        yield _flashinfer_tools(engine, folder)
    asking = [
        name
        for name, (backend, variant) in taken.items()
        if compiled_modules(backend, variant.kv_cache_dtype, named)
    ]
    yield ok("kernels compiled at start", _said(needs, asking, list(taken)))


def taken_backend(settings: Settings, variant: VariantSettings, gpus: list[Gpu]) -> str:
    """The attention backend that a variant gets: pinned, or the engine's own choice; without a card that of the oldest that runs it."""
    if variant.attention_backend is not None:
        return variant.attention_backend
    known = lowest_capability(gpus)
    head = (
        (head_sizes(geometry_of(settings)) or [HEAD_DIM])[0]
        if settings.model.config is not None
        else HEAD_DIM
    )
    for capability in CAPABILITIES if known is None else (known,):
        engine = Engine(settings.server.engine_version, "cuda", capability)
        found = attention_backends(variant.kv_cache_dtype, engine, head)
        if found:
            return found[0].backend
    return "none"


def _said(needs: Need, asking: list[str], names: list[str]) -> str:
    if needs == "triton":
        return "Triton's, in every variant"
    whom = "every variant" if len(asking) == len(names) else ", ".join(asking)
    return f"FlashInfer's in {whom}; Triton's in every variant"


def _c_compiler(engine: Mapping[str, str], folder: Path) -> Check:
    """A C compiler that builds a module with Python.h, which every kernel of Triton's is launched by."""
    try:
        compiler = c_compiler(engine)
    except EnvironmentUnfitError as error:
        return _missing("C compiler", str(error))
    python = str(folder / "bin" / "python") if is_complete(folder) else base_interpreter()
    include = _output([python, "-c", INCLUDE_FOLDER], os.environ) or ""
    if not (Path(include) / "Python.h").is_file():
        return _missing("C compiler", NO_PYTHON_H)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "module.c"
        source.write_text("#include <Python.h>\n")
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{scratch}/module.so"]
        done = subprocess.run(
            command, env=dict(engine), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        return unfit(
            "C compiler", f"{compiler} builds no module ({said})", "apt: build-essential and python3.11-dev"
        )
    return ok("C compiler", f"{compiler} builds modules with {include}/Python.h")


def _cxx_compiler(engine: Mapping[str, str]) -> Check:
    """The host compiler of nvcc (CC, else g++) and FlashInfer's linker (CXX, else c++), in a version that nvcc takes."""
    host, linker = engine.get("CC") or "g++", (engine.get("CXX") or "c++").split()[0]
    for name in (host, linker):
        if shutil.which(name, path=engine["PATH"]) is None:
            return _missing("C++ compiler", NO_CXX)
    said = _output([host, "-dumpfullversion"], engine)
    version = re.match(r"\d+", said or "")
    if version is None or "clang" in host:
        return ok("C++ compiler", f"{host}, of a version that isn't known")
    if int(version[0]) > NEWEST_GCC:
        return unfit(
            "C++ compiler",
            f"{host} is {said}, and the environment's nvcc takes up to {NEWEST_GCC}",
            f"install an older one (apt: g++-{NEWEST_GCC}) and set CC=gcc-{NEWEST_GCC} CXX=g++-{NEWEST_GCC}",
        )
    return ok("C++ compiler", f"{host} {said}")


def _cpu_compiler(variables: Mapping[str, str]) -> Check:
    """torch.compile's on a CPU: the model and the ranks of logprobs are compiled with it (vLLM 0.32, v1/sample/ops/logprobs.py), and
    the engine ends without one (torch 2.13: InvalidCxxCompiler)."""
    name = (variables.get("CXX") or "g++").split()[0]
    if shutil.which(name, path=variables.get("PATH", os.defpath)) is None:
        return unfit(
            "C++ compiler",
            f"no {name} is on the PATH, which the engine compiles with",
            "install one (apt: build-essential)",
        )
    return ok("C++ compiler", name)


def _flashinfer_tools(engine: Mapping[str, str], folder: Path) -> Check:
    """nvcc and ninja, where FlashInfer looks for them; of an environment that isn't built yet, that its lock brings them."""
    if not is_complete(folder):
        lock = locked(SERVE_CUDA)
        for package, sentence in (("nvidia-cuda-nvcc", NO_NVCC), ("ninja", NO_NINJA)):
            if package not in lock:
                return _missing("nvcc and ninja", sentence)
        brings = f"nvcc {lock['nvidia-cuda-nvcc']} and ninja {lock['ninja']}"
        return ok("nvcc and ninja", f"{SERVE_CUDA} brings {brings}, once it is built")
    release = re.search(
        r"release ([\d.]+)", _output([f"{engine['CUDA_HOME']}/bin/nvcc", "--version"], engine) or ""
    )
    if release is None:
        return _missing("nvcc and ninja", NO_NVCC)
    ninja = shutil.which("ninja", path=engine["PATH"])
    if ninja is None:
        return _missing("nvcc and ninja", NO_NINJA)
    return ok("nvcc and ninja", f"nvcc {release[1]} in {engine['CUDA_HOME']}, {ninja}")


def _missing(name: str, sentence: str) -> Check:
    """A sentence that says what is missing and, behind its colon, what to do."""
    found, _, fix = sentence.partition(": ")
    return unfit(name, found, fix)


def _output(command: list[str], variables: Mapping[str, str]) -> str | None:
    """What a command prints; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
