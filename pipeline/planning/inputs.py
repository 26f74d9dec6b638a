"""What `quantgate plan` reads beside the settings: a workload's lengths, and a model folder's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserInputError
from pipeline.files import read_json
from pipeline.models.check import weight_bytes
from pipeline.settings import Settings

if TYPE_CHECKING:
    from pipeline.capacity.workload import Lengths

FITTED = re.compile(r"mean=(?P<mean>[\d.]+),p95=(?P<p95>[\d.]+)")


def read_lengths(text: str, max_model_len: int) -> Lengths:
    """A workload from `mean=…,p95=…` or from a JSONL file; `UserInputError` names what is wrong and where."""
    from pipeline.capacity.workload import Lengths

    fitted = FITTED.fullmatch(text.replace(" ", ""))
    if fitted:
        return Lengths.fitted(float(fitted["mean"]), float(fitted["p95"]), max_model_len)
    path = Path(text)
    if not path.is_file():
        raise UserInputError(f"--workload {text!r} is neither mean=…,p95=… nor a file")
    tokens = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            tokens.append(_tokens(line, f"{path}, line {number}"))
    if not tokens:
        raise UserInputError(f"{path}: holds no lengths")
    return Lengths(tuple(tokens), f"{path.name}, {len(tokens):,} sequences")


def _tokens(line: str, where: str) -> int:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserInputError(f"{where}: not valid JSON ({error})") from None
    if isinstance(record, dict):
        keys = ("tokens",) if "tokens" in record else ("prompt_tokens", "output_tokens")
        values: list[Any] = [record.get(key) for key in keys]
    else:
        keys, values = ("the line",), [record]
    for key, value in zip(keys, values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserInputError(f"{where}: {key} is {value!r}, it must be a whole number of tokens")
    if sum(values) < 1:
        raise UserInputError(f"{where}: a sequence of 0 tokens")
    return int(sum(values))


def with_model_folder(settings: Settings, folder: Path) -> tuple[Settings, dict[str, int]]:
    """The same settings with the geometry of `folder`'s config.json, and the bytes of its checkpoint where it has one.

    Bytes come by weights scheme: a checkpoint with a quantization_config is the profile's quantized scheme, else it is bf16.
    """
    path = folder / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserInputError(f"{path}: must hold one JSON object")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
    model = settings.model.model_copy(update={"name": name, "config": config})
    counted: dict[str, int] = {}
    if any(folder.glob("*.safetensors")):
        scheme = next(iter(settings.quantizers), "bf16") if config.get("quantization_config") else "bf16"
        counted[scheme] = weight_bytes(folder)
    return settings.model_copy(update={"model": model}), counted
