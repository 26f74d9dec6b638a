"""Profiles under the real DVC, the real graph and confs; only the stages' work is missing (support/stage_recorder.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.environments.build import environment_folder
from tests.support.tree import ROOT, copy_tree

BIN = environment_folder("orchestrator") / "bin"
ALL = {"environment", "prepare", "quantize awq", "plan", "verdict", "report", "track"} | {
    f"{stage} {variant}" for stage in ("measure", "quality") for variant in ("bf16", "awq")
}


class Clone:
    """A clone whose stages record. Two profiles of its own: `one` and `two`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, folder.parent / "ran.txt"
        copy_tree(folder, without="tests")
        shutil.copy(ROOT / "tests/support/stage_recorder.py", folder / "pipeline/__main__.py")
        for name in ("one", "two"):
            self.add_profile(name)
        self.quantgate("use", "one")
        for command in (
            ["git", "init", "--quiet"],
            ["git", "add", "."],
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "clone"],
        ):
            subprocess.run(command, cwd=folder, check=True)

    def add_profile(self, name: str) -> None:
        text = (
            (self.folder / "conf/profile/demo.yaml").read_text().replace("profile: demo", f"profile: {name}")
        )
        text = text.replace("control: bf16-again", "control: null")
        text = re.sub(r"variant_names: .*", "variant_names: [bf16, awq]", text)
        (self.folder / f"conf/profile/{name}.yaml").write_text(text)

    def quantgate(self, *words: str) -> None:
        subprocess.run([BIN / "python", "-m", "pipeline.cli", *words], cwd=self.folder, check=True)

    def dvc(self, *words: str, works: bool = True) -> tuple[set[str], str]:
        """Run dvc; which stages ran, and what it said."""
        self.record.write_text("")
        environment = os.environ | {"RECORDED_STAGES": str(self.record)}
        environment |= {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t"}
        environment |= {"GIT_COMMITTER_EMAIL": "t@t"}
        done = subprocess.run(
            [BIN / "dvc", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert (done.returncode == 0) is works, said
        return set(self.record.read_text().splitlines()), said

    def choose(self, profile: str) -> None:
        path = self.folder / "params.yaml"
        path.write_text(re.sub(r"profile: .*", f"profile: {profile}", path.read_text()))

    def stamps(self, profile: str) -> set[str]:
        """Profiles that anything in runs/<profile>/ was made by or from."""
        found: set[str] = set()
        for path in (self.folder / "runs" / profile).rglob("*"):
            if path.is_file() and path.name not in (
                "environment.json",
                "dvc.yaml",
                "dvc.lock",
                "params.yaml",
            ):
                content = json.loads(path.read_text())
                found |= {content["profile"], *content["read"]}
        return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("switch") / "clone")


def test_the_story_of_two_profiles(clone: Clone) -> None:
    """One test, since each step needs the one before it."""
    results = clone.folder / "results"
    ran, _ = clone.dvc("repro")
    assert ran == ALL
    assert os.readlink(results) == "runs/one" and clone.stamps("one") == {"one"}

    # Another profile: every stage runs, in a folder of its own, and nothing of the first is read or touched.
    before = (clone.folder / "runs/one/verdict.json").stat().st_mtime_ns
    ran, _ = clone.dvc("exp", "run", "-S", "profile=two")
    assert ran == ALL
    assert os.readlink(results) == "runs/two" and clone.stamps("two") == {"two"}
    assert (clone.folder / "runs/one/verdict.json").stat().st_mtime_ns == before
    assert "profile: two" in (clone.folder / "params.yaml").read_text()

    # Back again, by the other way of choosing: nothing is measured.
    clone.choose("one")
    ran, _ = clone.dvc("repro")
    assert ran == {"environment"}
    assert os.readlink(results) == "runs/one"

    # Results gone, lock gone: the run cache has them.
    for path in (clone.folder / "runs/one").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("dvc.yaml", "params.yaml"):
            path.unlink()
    ran, said = clone.dvc("repro")
    assert ran == {"environment"}, said
    assert clone.stamps("one") == {"one"}

    # A value of one variant, changed from the command line, reaches that variant's stages and no other's.
    ran, _ = clone.dvc("exp", "run", "-S", "conf/variant/awq.yaml:description=tried")
    assert ran == ALL - {"prepare", "quantize awq", "measure bf16", "quality bf16"}
    assert "description: tried" in json.loads((results / "measure/awq.json").read_text())["variant"]
    subprocess.run(["git", "checkout", "--quiet", "conf"], cwd=clone.folder, check=True)
    ran, said = clone.dvc("repro")
    assert ran == {"environment"}, said
    assert "tried" not in json.loads((results / "measure/awq.json").read_text())["variant"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("profile=nope", "profile/nope"),
        ("profile=three", "run `quantgate use three`"),
    ],
)
def test_what_cant_be_chosen_is_refused(clone: Clone, override: str, said: str) -> None:
    """A profile that isn't there, and one that the graph doesn't have yet."""
    clone.add_profile("three")
    ran, output = clone.dvc("exp", "run", "-S", override, works=False)
    assert ran <= {"environment"}
    assert said in output and "Traceback" not in output
    clone.choose("one")
