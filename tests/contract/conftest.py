"""What several modules of contract tests share: one load generator, tokenizers, and an eval set as a team would bring it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.load.driver import LoadSession, make_driver
from tests.support.environments import environment_python
from tests.support.zoo_set import ANIMALS, YAML, page, write_items, zoo_items


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadSession]:
    """One generator process for all: importing vLLM takes 10 s. A proxy of the user's must not be in the way."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
            patch.setenv("http_proxy", "http://127.0.0.1:9")
            patch.setenv("NO_PROXY", "")
            driver = make_driver("vllm-bench", environment_python("serve"))
            started = stack.enter_context(driver.session(tmp_path_factory.mktemp("bench")))
        yield started


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {chr(0x4E00 + number): number for number in range(2000)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer trained on next to nothing: real merges, no download."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([page(i) for i in range(40)] + [f" {a}" for a in ANIMALS], vocab_size=600)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An eval set as a team would bring it."""
    target = tmp_path / "zoo"
    target.mkdir()
    write_items(target, zoo_items())
    (target / "zoo.yaml").write_text(YAML)
    return target
