"""The files around the weights: what every environment read in the source folder, it must read in the quantized one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pipeline.files import read_json, write_json

DESCRIBING = (".json", ".jinja", ".txt", ".model")


def dress(source: Path, out: Path, quantization_config: dict[str, Any]) -> None:
    """Put the source's own config, tokenizer and generation settings into `out`, with `quantization_config` added.

    A backend writes what its transformers makes of them, which another version may misread silently; the source's files are
    known to read the same everywhere (`pipeline.models.normalize`).
    """
    config = read_json(source / "config.json")
    write_json(out / "config.json", {**config, "quantization_config": quantization_config})
    for path in source.iterdir():
        describes = path.suffix in DESCRIBING and not path.name.endswith(".index.json")
        if describes and path.name != "config.json":
            shutil.copyfile(path, out / path.name)


def served_dtype(source: Path) -> str:
    """Name of the torch dtype that the source is stored and served in, e.g. bfloat16."""
    return str(read_json(source / "config.json").get("dtype", "bfloat16"))
