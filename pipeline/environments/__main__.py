"""`python3 -m pipeline.environments [NAME …]` builds; `… lock [NAME …]` resolves the locks anew.

Without a name it builds what the profile in params.yaml needs. Whatever else is asked for later (a test's environment, another
profile's quantizer) is built then.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pipeline.environments.build import (
    CUDA,
    ENVIRONMENTS,
    PYTHON,
    ROOT,
    TOOLS,
    ensure,
    lock_file,
    locked,
    uv,
    uv_settings,
)
from pipeline.environments.needed import selected
from pipeline.environments.uv import cause
from pipeline.errors import EnvironmentUnfitError, run_main
from pipeline.files import write_text

EXTRA_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL")


def lock(name: str) -> None:
    """Resolve the group `name` of pyproject.toml into its lock file, with the hashes of all files and no index or path in it.

    Versions in a lock that is there stay as long as the group allows them; without one the newest are taken. Extra indexes aren't
    asked: one that holds some files of a package would leave the hashes of the others out.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    on_cpu = name in ENVIRONMENTS and not name.endswith(CUDA)
    variables = {key: value for key, value in uv_settings()[0].items() if key not in EXTRA_INDEXES}
    # With torch from PyPI what vllm asks for beside it fits it.
    excluded = project["tool"]["quantgate"]["environments"]["exclude"] if on_cpu else []
    target = lock_file(name)
    with tempfile.TemporaryDirectory() as folder:
        wanted, overrides, made = (Path(folder) / file for file in ("in.txt", "overrides.txt", "out.txt"))
        wanted.write_text("\n".join(project["dependency-groups"][name]) + "\n")
        overrides.write_text("".join(f"{package}; sys_platform == 'never'\n" for package in excluded))
        if target.is_file():
            shutil.copy(target, made)
        command = [
            str(uv()), "pip", "compile", str(wanted), "--quiet", "--output-file", str(made), "--override", str(overrides),
            "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links",
            "--python-version", f"{PYTHON[0]}.{PYTHON[1]}",
        ]  # fmt: skip
        if not on_cpu:
            variables.pop("UV_FIND_LINKS", None)  # a folder may hold the build for a CPU
        elif "UV_FIND_LINKS" not in variables:
            command += ["--torch-backend", "cpu"]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EnvironmentUnfitError(f"{name} can't be resolved: {cause(result.stderr)}")
        resolved = made.read_text(encoding="utf-8")
    header = f"# Lock of {name}: made by `make lock` from pyproject.toml's dependency group.\n"
    write_text(target, header + resolved)
    print(f"{target.relative_to(ROOT)}: {len(locked(name))} packages")


def main() -> int:
    names = sys.argv[1:]
    if names[:1] == ["lock"]:
        for name in names[1:] or (TOOLS, *ENVIRONMENTS):
            lock(name)
        return 0
    for name in names or selected():
        ensure(name)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
