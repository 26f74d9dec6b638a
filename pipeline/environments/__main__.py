"""`python3 -m pipeline.environments [NAME …]` builds; `… lock [NAME …]` resolves the locks anew (needs uv).

Without a name it builds what the profile in params.yaml needs. Whatever else is asked for later (a test's environment, another
profile's quantizer) is built then.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pipeline.environments.build import CUDA, ENVIRONMENTS, PYTHON, ROOT, ensure, lock_file
from pipeline.environments.needed import selected
from pipeline.errors import EnvironmentUnfitError, run_main
from pipeline.files import write_text


def lock(name: str) -> None:
    """Resolve the group `name` of pyproject.toml into its lock file, without naming any index or path in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    on_card = name.endswith(CUDA)
    links = (
        []
        if on_card
        else subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
    )
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "in.txt"
        wanted.write_text("\n".join(project["dependency-groups"][name]) + "\n")
        overrides = Path(folder) / "overrides.txt"
        # With torch from PyPI what vllm asks for beside it fits it.
        excluded = [] if on_card else project["tool"]["quantgate"]["environments"]["exclude"]
        overrides.write_text("".join(f"{package}; sys_platform == 'never'\n" for package in excluded))
        command = [
            "uv", "pip", "compile", str(wanted), "--quiet", "--override", str(overrides), "--no-header",
            "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--torch-backend", "cpu",
            "--python-version", f"{PYTHON[0]}.{PYTHON[1]}",
        ]  # fmt: skip
        for link in links:
            command += ["--find-links", link]
        if links or on_card:  # a local wheel folder, or PyPI, has the torch that is asked for
            command.remove("--torch-backend")
            command.remove("cpu")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise EnvironmentUnfitError(f"{name} can't be resolved: {result.stderr.strip()}")
    lines = [line for line in result.stdout.splitlines() if line.split("==")[0] not in excluded]
    header = (
        f"# Lock of the environment {name}: made by `make lock` from pyproject.toml's dependency group.\n"
    )
    write_text(lock_file(name), header + "\n".join(lines) + "\n")
    print(f"{lock_file(name).relative_to(ROOT)}: {len(lines)} packages")


def main() -> int:
    names = sys.argv[1:]
    if names[:1] == ["lock"]:
        for name in names[1:] or ENVIRONMENTS:
            lock(name)
        return 0
    for name in names or selected():
        ensure(name)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
