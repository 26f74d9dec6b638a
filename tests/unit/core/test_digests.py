"""A checkpoint's digest: read once, and never an old one for a new content."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline import digests
from pipeline.files import sha256_file


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read; what was just written counts as settled."""
    names: list[str] = []

    def counted(path: str | Path) -> str:
        names.append(Path(path).name)
        return sha256_file(path)

    monkeypatch.setattr(digests, "SETTLED_S", -1.0)
    monkeypatch.setattr(digests, "sha256_file", counted)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "weights"
    (target / "deep").mkdir(parents=True)
    (target / "config.json").write_text("{}")
    (target / "deep" / "model").write_text("1234")
    return target


def tree(folder: Path) -> str:
    return digests.sha256_tree(folder, folder.parent / "digests" / "weights.json")


def test_names_and_contents_are_in_it(folder: Path, read: list[str]) -> None:
    first = tree(folder)
    (folder / "config.json").rename(folder / "b")
    second = tree(folder)
    (folder / "deep" / "model").write_text("1235")
    assert len({first, second, tree(folder)}) == 3


def test_only_what_changed_is_read_again(folder: Path, read: list[str]) -> None:
    first = tree(folder)
    assert sorted(read) == ["config.json", "model"]
    assert tree(folder) == first and len(read) == 2
    (folder / "config.json").write_text("[]")
    second = tree(folder)
    assert second != first and read[2:] == ["config.json"]
    (folder / "config.json").write_text("{}")
    assert tree(folder) == first


def test_a_content_of_the_same_size_with_its_time_set_back_is_seen(folder: Path, read: list[str]) -> None:
    path = folder / "deep" / "model"
    first, stat = tree(folder), path.stat()
    path.write_text("4321")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert tree(folder) != first


def test_what_changed_a_moment_ago_is_not_taken_as_known(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_S", 3600.0)
    assert tree(folder) == tree(folder)
    assert len(read) == 4


@pytest.mark.parametrize("damage", ["{", "[]", '{"config.json": {}}'])
def test_what_was_kept_may_be_damaged_or_impossible_to_write(
    folder: Path, read: list[str], damage: str
) -> None:
    first, kept = tree(folder), folder.parent / "digests" / "weights.json"
    kept.write_text(damage)
    assert tree(folder) == first and len(read) == 4
    shutil.rmtree(kept.parent)
    kept.parent.write_text("a file where the folder should be")
    assert tree(folder) == first and len(read) == 6
