"""Build an environment whole or not at all.

The folder is made at its final path (scripts of a virtual environment carry absolute paths, so it can't be moved)
and counts as finished only once the marker file stands in it; without the marker it is wiped and built again. A
file lock keeps two builds of the same environment apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pipeline.environments.owners import clashes, describe
from pipeline.environments.toolkit import c_compiler, make_cuda_home
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.files import cache_folder, write_text

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).parent / "locks"
MARKER = ".quantgate-complete"
PYTHON = (3, 11)  # requires-python of pyproject.toml; the locks are resolved for it

CUDA = "-cuda"
"""Ends the name of an environment whose torch is built for a card. Which of the two a stage takes follows its profile's device,
not the machine: one with a card also runs the demo, and that is a CPU's."""

SERVE_CUDA = f"serve{CUDA}"
"""The engine's on a card: the only one in which kernels are compiled."""

ELSEWHERE = frozenset(
    {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN", "PYTHONPATH", "PYTHONHOME"}
)

# Environment -> what must import for it to count as built.
ENVIRONMENTS = {
    "orchestrator": "import dvc, hydra, mlflow, lm_eval, pydantic, pyarrow, scipy",
    "serve": "import torch, transformers, vllm",
    "autoawq": "import torch, awq",
    "llmcompressor": "import torch, llmcompressor",
    "serve-cuda": "import torch, transformers, vllm; assert torch.version.cuda, 'torch without CUDA was installed'",
    "autoawq-cuda": "import torch, awq; assert torch.version.cuda, 'torch without CUDA was installed'",
    "llmcompressor-cuda": "import torch, llmcompressor; assert torch.version.cuda, 'torch without CUDA was installed'",
}


def on_device(name: str, kind: str) -> str:
    """The environment that does `name`'s work on a device of a kind, cpu or cuda."""
    return f"{name}{CUDA}" if kind == "cuda" and f"{name}{CUDA}" in ENVIRONMENTS else name


def needed_bytes(name: str) -> int:
    """Disk that a build takes. On a CPU the largest (serve) measured 3.5 GB, plus pip's unpacking. For a card the wheels of
    serve-cuda are 4.0 GB by the index and 8.4 GB unpacked (measured), and pip keeps them."""
    return (14 if name.endswith(CUDA) else 6) * 1024**3


def has_card() -> bool:
    """Whether an NVIDIA driver is loaded here (or lent by Windows): asked before gigabytes are fetched for a card."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"))


def lock_file(name: str) -> Path:
    """The lock of environment `name`; `UserInputError` for a name that isn't one."""
    if name not in ENVIRONMENTS:
        raise UserInputError(f"unknown environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return LOCKS / f"{name}.txt"


def environment_folder(name: str) -> Path:
    """Where environment `name` lives: keyed by lock, Python version and machine type."""
    digest = hashlib.sha256(lock_file(name).read_bytes()).hexdigest()[:16]
    key = f"{name}-py{PYTHON[0]}.{PYTHON[1]}-{platform.machine()}-{digest}"
    return cache_folder("environments") / key


def is_complete(folder: Path) -> bool:
    """True once the build has put its marker down and the interpreter is still there."""
    return (folder / MARKER).is_file() and (folder / "bin" / "python").exists()


def interpreter(name: str) -> Path:
    """Path of the Python of environment `name`, building the environment first if needed."""
    return ensure(name) / "bin" / "python"


def ensure(name: str) -> Path:
    """Make environment `name` exist and `.venv/<name>` point to it; returns its folder. Instant when built."""
    folder = environment_folder(name)
    if not is_complete(folder):
        if name.endswith(CUDA) and not has_card():
            raise EnvironmentUnfitError(
                f"environment {name} is for an NVIDIA card, and no driver is loaded here; run the profile where the card is, or "
                "`quantgate use demo`"
            )
        with _exclusive(folder) as lock:
            if not is_complete(folder):
                _build(name, folder, lock)
    _link(ROOT / ".venv" / name, folder)
    return folder


def base_interpreter() -> str:
    """A Python of the locked version to make environments with."""
    if sys.version_info[:2] == PYTHON:
        return getattr(sys, "_base_executable", sys.executable) or sys.executable
    found = shutil.which(f"python{PYTHON[0]}.{PYTHON[1]}")
    if not found:
        version = f"{PYTHON[0]}.{PYTHON[1]}"
        raise EnvironmentUnfitError(
            f"Python {version} is needed and not on the PATH; install it (for example `uv python install {version}`, "
            f"`pyenv install {version}` or your distribution's python{version} with venv) and run again"
        )
    return found


@contextmanager
def _exclusive(folder: Path) -> Iterator[int]:
    """Hold the lock; yields its descriptor. Every command of the build inherits it, so the lock outlives a killed build until the
    pip that it started is gone too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(folder.suffix + ".lock"), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is building {folder.name}; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _link(link: Path, folder: Path) -> None:
    if link.is_symlink() and os.readlink(link) == str(folder):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists() and not link.is_symlink():
        raise UserInputError(f"{link} is in the way: it must be a link to {folder}; move it aside")
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(folder)
    os.replace(temporary, link)


def _build(name: str, folder: Path, lock: int) -> None:
    started = time.monotonic()
    if folder.is_symlink() or folder.is_file():
        folder.unlink()  # a virtual environment stands at its own path
    shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    needed = needed_bytes(name)
    if free < needed:
        raise EnvironmentUnfitError(
            f"{folder.parent}: {free / 1024**3:.1f} GiB free, building {name} needs {needed / 1024**3:.0f} GiB; "
            "free some or point XDG_CACHE_HOME at a larger disk"
        )
    if name == SERVE_CUDA:
        c_compiler(
            os.environ
        )  # what the engine can't start without is asked for before gigabytes are fetched
    print(f"building environment {name} in {folder} (once per lock)", file=sys.stderr, flush=True)
    log = folder.with_suffix(folder.suffix + ".log")
    with open(log, "w", encoding="utf-8") as output:
        commands = _Commands(name, log, output, lock)
        commands.run([base_interpreter(), "-m", "venv", str(folder)])
        python = str(folder / "bin" / "python")
        lines = [
            line for line in lock_file(name).read_text().splitlines() if line and not line.startswith("#")
        ]
        torch = [line for line in lines if line.startswith("torch==") and line.endswith("+cpu")]
        if torch:
            _install_torch(commands, python, torch[0])
        rest = write_text(
            folder / "requirements.txt", "\n".join(_exactly(name, x) for x in lines if x not in torch) + "\n"
        )
        commands.run([*_pip(python), "--no-deps", "-r", str(rest)])
        commands.run([python, "-c", ENVIRONMENTS[name]], cwd=folder)
    if found := clashes(folder):
        raise EnvironmentUnfitError(
            f"environment {name}: {describe(found)}; which of them wins is chance, so its lock needs other versions"
        )
    if name == SERVE_CUDA:
        make_cuda_home(folder)
    if name == "orchestrator":
        _write_script(folder)
    write_text(folder / MARKER, f"{lock_file(name).name}\n")
    print(f"built {name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _exactly(name: str, requirement: str) -> str:
    """A line of a lock as pip shall take it. `==2.13.0` also lets a local 2.13.0+cpu in, and where a folder of wheels offers
    one pip prefers it: torch without CUDA in an environment for a card. `===` is that version and no other (PEP 440)."""
    return requirement.replace("==", "===", 1) if name.endswith(CUDA) else requirement


def build_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a build's commands: the inherited ones without those that lead pip or Python to another folder.

    Where pip finds packages, and with which constraints, stays the user's to say.
    """
    return {key: value for key, value in inherited.items() if key not in ELSEWHERE} | {"PIP_USER": "0"}


def _pip(python: str) -> list[str]:
    return [
        python,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]


def _install_torch(commands: _Commands, python: str, requirement: str) -> None:
    """The CPU build isn't on PyPI: take it from where pip is configured to look, else from PyTorch's CPU index.

    uv knows that index by itself (`--torch-backend cpu`), so no host is written down here.
    """
    if commands.attempt([*_pip(python), "--no-deps", requirement]) == 0:
        return
    commands.run([*_pip(python), "uv"])
    commands.run(
        [python, "-m", "uv", "pip", "install", "--python", python, "--no-deps", "--torch-backend", "cpu", requirement],
    )  # fmt: skip


@dataclass(frozen=True)
class _Commands:
    """Runs a build's commands: one log, one environment, and the build's lock held by each of them."""

    name: str
    log: Path
    output: TextIO
    lock: int

    def attempt(self, command: list[str], cwd: Path | None = None) -> int:
        """Run a command; returns its exit code."""
        return subprocess.run(
            command, stdout=self.output, stderr=subprocess.STDOUT, cwd=cwd, env=build_variables(os.environ),
            pass_fds=(self.lock,), check=False,
        ).returncode  # fmt: skip

    def run(self, command: list[str], cwd: Path | None = None) -> None:
        """Run a command that must work; `EnvironmentUnfitError` with the cause found in the log."""
        code = self.attempt(command, cwd)
        if code:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            errors = [line for line in text.splitlines() if "error" in line.lower() and "WARNING" not in line]
            cause = errors[-1].strip() if errors else f"exit code {code}"
            raise EnvironmentUnfitError(
                f"environment {self.name} couldn't be built: {cause} (log: {self.log})"
            )


def _write_script(folder: Path) -> None:
    """The `quantgate` command: runs the code of the clone it is called from, since clones share the environment."""
    script = folder / "bin" / "quantgate"
    write_text(
        script,
        f"#!{folder}/bin/python\n"
        '"""Run quantgate from the clone that this command is called through, or that the working folder lies in."""\n'
        "import os, sys\n"
        "from pathlib import Path\n"
        "here = Path(os.path.abspath(sys.argv[0])).parents\n"
        "for root in [*here, Path.cwd(), *Path.cwd().parents]:\n"
        "    if (root / 'pipeline' / 'cli.py').is_file() and (root / 'dvc.yaml').is_file():\n"
        "        sys.path.insert(0, str(root))\n"
        "        break\n"
        "else:\n"
        "    sys.exit('error: no quantgate clone here; cd into one')\n"
        "from pipeline.cli import main\n"
        "sys.exit(main())\n",
    )
    script.chmod(0o755)
