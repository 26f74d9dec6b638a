"""What the contract tests of the quality runner share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zoo_set import ANIMALS, YAML, page, write_items, zoo_items


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
