"""`make card-check`: what of a card's way can be proven on a machine without one, with the real packages. Minutes, and 12 GB of disk.

The environment serve-cuda is built as on a machine with a card; its packages agree and share no file; the kernels that an RTX 4090
runs are in the engine's wheel; FlashInfer's modules are compiled for it by the environment's own nvcc, and how long that takes is held
against the profile's start-up limit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.compatibility.compilers import COMPILERS, NEWEST_GCC, SAMPLER_MODULE
from pipeline.environments import build
from pipeline.environments.owners import clashes, describe
from pipeline.environments.toolkit import STUB, cuda_home, packaged_toolkit
from pipeline.errors import EnvironmentUnfitError, UserInputError, run_main
from pipeline.serving.compiling import compile_environment
from pipeline.settings import load_settings
from tests.support.wheels import unpacked

ROOT = Path(__file__).resolve().parents[1]
CORES = 8  # of the machine around a card, by and large
CUOBJDUMP = "nvidia-cuda-cuobjdump===13.5.37"  # reads older cubins too; the lock's 13.0 has none on PyPI
# File of the vllm wheel -> (architecture, kernels, at least so many): code for 8.0 runs on 8.9, NVIDIA's rule for one major version.
KERNELS = {
    "_C_stable_libtorch.abi3.so": ("sm_89", "Marlin", 100),
    "vllm_flash_attn/_vllm_fa2_C.abi3.so": ("sm_80", "flash_fwd_splitkv_kernel", 100),
}
IMPORTS = (
    "import torch, transformers, vllm, flashinfer, triton; "
    "print('torch', torch.__version__, 'vllm', vllm.__version__, 'flashinfer', flashinfer.__version__, 'triton', triton.__version__)"
)
# The compiled parts want the driver's library, in whose place the toolkit's stub is loaded.
COMPILED = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]); import torch, vllm._C_stable_libtorch, vllm._moe_C_stable_libtorch, "
    "vllm.vllm_flash_attn._vllm_fa2_C; print('marlin_gemm' if hasattr(torch.ops._C, 'marlin_gemm') else 1 / 0, 'can be called')"
)


def main() -> None:
    """`python -m tests.card_check kernels` makes the checks named, without names all."""
    checks = {"environment": environment, "kernels": kernels, "modules": modules}
    unknown = [name for name in sys.argv[1:] if name not in checks]
    if unknown:
        raise UserInputError(f"no such check: {', '.join(unknown)}; there are {', '.join(checks)}")
    build.has_card = lambda: True  # built for one that is elsewhere
    folder = build.ensure(build.SERVE_CUDA)
    with tempfile.TemporaryDirectory() as scratch:
        variables = _variables(folder, Path(scratch))
        for name in sys.argv[1:] or checks:
            checks[name](folder, variables)
            sys.stdout.flush()


def _variables(folder: Path, scratch: Path) -> dict[str, str]:
    """An engine's, but with an empty cache and the RTX 4090's architecture."""
    return compile_environment(os.environ, folder / "bin" / "python") | {
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_CUDA_ARCH_LIST": "8.9",
        "PYTHONPATH": "",
    }


def environment(folder: Path, variables: dict[str, str]) -> None:
    """Packages that agree, import, and own their files alone."""
    python = folder / "bin" / "python"
    print(_run([build.uv(), "pip", "check", "--python", python], variables))
    print(_run([python, "-c", IMPORTS], variables))
    print(_run([python, "-c", COMPILED, cuda_home(folder) / STUB], variables))
    shared = clashes(folder)
    _require(not shared, describe(shared) if shared else "")
    print("no file has two owners")
    toolkit = packaged_toolkit(folder)
    _require(toolkit is not None, "no nvcc in the environment")
    assert toolkit is not None
    header = (toolkit / "include/crt/host_config.h").read_text()
    newest = re.search(r"#if __GNUC__ > (\d+)", header)
    _require(
        newest is not None and int(newest[1]) == NEWEST_GCC,
        f"{toolkit}: another newest g++ than {NEWEST_GCC}",
    )
    print(_run([cuda_home(folder) / "bin/nvcc", "--version"], variables).splitlines()[-2])


def kernels(folder: Path, _: dict[str, str]) -> None:
    """The wheel's own kernels for an RTX 4090."""
    dump = _cuobjdump()
    (package,) = (folder / "lib").glob("python3.*/site-packages/vllm")
    for name, (architecture, kernel, fewest) in KERNELS.items():
        listed = _run([dump, "-symbols", "-arch", architecture, package / name])
        found = sum(kernel in line for line in listed.splitlines())
        _require(found >= fewest, f"{name}: {found} {kernel} kernels for {architecture}, {fewest} expected")
        print(f"{name}: {found} {kernel} kernels for {architecture}")


def modules(folder: Path, variables: dict[str, str]) -> None:
    """FlashInfer's, compiled as at a first start."""
    limit = load_settings(["profile=rtx4090"]).server.startup_timeout_s
    wanted = [SAMPLER_MODULE, *(module for row in COMPILERS for module in row.modules)]
    request = {"modules": wanted, "driver": str(cuda_home(folder) / STUB)}
    answer = _run(
        [folder / "bin/python", "-m", "tests.support.flashinfer_build"], variables, json.dumps(request)
    )
    dump = _cuobjdump()
    print(
        f"{'module':64} {'wall s':>7} {'CPU s':>6} {'slowest file s':>15} {'second start s':>15} {'GiB a compiler':>15}"
    )
    for name, found in json.loads(answer.splitlines()[-1]).items():
        _require("sm_89" in _run([dump, "--list-elf", found["file"]]), f"{name}: no code for 8.9")
        _require(bool(found["functions"]), f"{name}: none of its functions can be called")
        print(
            f"{name[:64]:64} {found['wall_s']:7.0f} {found['cpu_s']:6.0f} {found['slowest_file_s']:15.0f} {found['again_s']:15.1f} "
            f"{found['compiler_bytes'] / 2**30:15.2f}"
        )
        least = max(found["cpu_s"] / CORES, found["slowest_file_s"])
        _require(found["wall_s"] < limit, f"{name} takes longer than a start may ({limit:.0f} s)")
        print(
            f"    on {CORES} cores {least:.0f} s or a little more, of the {limit:.0f} s that a start may take; once"
        )


def _cuobjdump() -> Path:
    dump = next(unpacked(CUOBJDUMP.replace("===", "-"), [CUOBJDUMP]).rglob("cuobjdump"))
    dump.chmod(0o755)
    return dump


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise EnvironmentUnfitError(otherwise)


def _run(command: list[str | Path], variables: dict[str, str] | None = None, given: str | None = None) -> str:
    done = subprocess.run(
        command, env=variables, input=given, capture_output=True, text=True, cwd=ROOT, check=False
    )
    _require(done.returncode == 0, f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(run_main(main))
