"""Is this folder a complete model of the geometry that its config claims? Answered from headers, without torch.

A safetensors file starts with 8 bytes of header length (little-endian), then a JSON header that names each
tensor's dtype, shape and byte range (format: github.com/huggingface/safetensors, README "Format"). Reading
only that much checks a 15 GB model in milliseconds and needs no tensor library.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.files import read_json
from pipeline.models.architectures import expected_shapes, geometry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SOURCE_DTYPES = ("BF16", "F16", "F32")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit (safetensors README)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str
    start: int
    """Byte of the file at which it begins."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelFacts:
    """What a checked folder holds."""

    architecture: str
    model_type: str
    dtype: str
    """Dtype of the matrices as the header spells it, e.g. `BF16`."""
    parameters: int
    weight_bytes: int
    quantized: bool


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file by name.

    Raises `UserInputError` when the file is cut short or isn't a safetensors file.
    """
    actual_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, actual_bytes):
            raise UserInputError(f"{path}: not a safetensors file, or cut short")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        except ValueError:
            raise UserInputError(f"{path}: the safetensors header is not valid JSON") from None
    header.pop("__metadata__", None)
    tensors = {
        name: TensorInfo(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            size_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            file=path.name,
            start=8 + header_bytes + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
    expected_bytes = 8 + header_bytes + sum(tensor.size_bytes for tensor in tensors.values())
    if actual_bytes != expected_bytes:
        raise UserInputError(
            f"{path}: {actual_bytes} bytes, but its header describes {expected_bytes}; fetch it again"
        )
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, by the shard index where there is one."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise UserInputError(
                f"{index}: names shards that are not in the folder: {', '.join(missing) or 'none named'}"
            )
        return [folder / name for name in names]
    if not (folder / SINGLE_NAME).is_file():
        raise UserInputError(
            f"{folder}: no weights; needs {SINGLE_NAME} or {INDEX_NAME} (other formats must be converted to safetensors)"
        )
    return [folder / SINGLE_NAME]


def read_tensors(folder: str | Path) -> dict[str, TensorInfo]:
    """All tensors of a model folder by name, from the headers of its safetensors files."""
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(Path(folder)):
        tensors.update(read_header(path))
    return tensors


def read_scalars(folder: str | Path, suffixes: tuple[str, ...]) -> dict[str, float]:
    """The values of all one-element tensors whose names end with one of `suffixes`, by name, read without torch.

    Raises `UserInputError` for one that has more elements or isn't floating point.
    """
    found: dict[str, float] = {}
    for path in weight_files(Path(folder)):
        wanted = {name: info for name, info in read_header(path).items() if name.endswith(suffixes)}
        for name, info in wanted.items():
            if info.elements != 1 or info.dtype not in SOURCE_DTYPES:
                raise UserInputError(
                    f"{path}: {name} is {info.dtype} of shape {list(info.shape)}; a scale must be one floating-point number"
                )
            with path.open("rb") as file:
                file.seek(info.start)
                raw = file.read(info.size_bytes)
            # BF16 is the upper half of a float32.
            value = {"BF16": ("<f", b"\0\0" + raw), "F16": ("<e", raw), "F32": ("<f", raw)}[info.dtype]
            found[name] = struct.unpack(*value)[0]
    return found


def weight_bytes(folder: str | Path) -> int:
    """Bytes of all tensors in the folder (padding and headers not counted): W as stored."""
    return sum(tensor.size_bytes for tensor in read_tensors(folder).values())


def parameter_count(folder: str | Path) -> int:
    """Parameters of the model before any quantization, from its config's geometry.

    A quantized folder packs several weights into one element, so its elements can't be counted instead.
    """
    path = Path(folder) / "config.json"
    shapes = expected_shapes(geometry(read_json(path), str(path)))
    return sum(math.prod(shape) for shape in shapes.values())


def check_model(folder: str | Path, *, allow_quantized: bool = False) -> ModelFacts:
    """Check that `folder` is a whole model: config, tokenizer, weights, and shapes that match the config.

    Set `allow_quantized` to accept a folder with a `quantization_config` (its packed tensors are not compared
    with the geometry; `pipeline.quantize.proof` does that). Raises `UserInputError` with file, key and value.
    """
    root = Path(folder)
    config_path = root / "config.json"
    if not config_path.is_file():
        raise UserInputError(
            f"{root}: no config.json; a model folder holds config.json, a tokenizer and safetensors"
        )
    config = read_json(config_path)
    if not any((root / name).is_file() for name in TOKENIZER_NAMES):
        raise UserInputError(f"{root}: no tokenizer; needs one of {', '.join(TOKENIZER_NAMES)}")
    quantization = config.get("quantization_config")
    if quantization is not None and not allow_quantized:
        raise UserInputError(
            f"{config_path}: quantization_config.quant_method={quantization.get('quant_method')!r}; "
            "the source of a comparison must be unquantized weights (BF16, F16 or F32)"
        )
    tensors = read_tensors(root)
    if quantization is None:
        _check_shapes(root, config, tensors)
    embedding = tensors.get("model.embed_tokens.weight")
    return ModelFacts(
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=config["model_type"],
        dtype=embedding.dtype if embedding else "unknown",
        parameters=parameter_count(root),
        weight_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
        quantized=quantization is not None,
    )


def _check_shapes(root: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
    expected = expected_shapes(geometry(config, str(root / "config.json")))
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise UserInputError(
            f"{root}: {len(missing)} tensors that config.json asks for are missing, first: {missing[0]}"
        )
    # A tied model may still store its head; any other surplus means config and weights are not of one model.
    surplus = sorted(
        name
        for name in tensors.keys() - expected.keys() - {"lm_head.weight"}
        if not name.endswith("rotary_emb.inv_freq")
    )
    if surplus:
        raise UserInputError(
            f"{root}: {len(surplus)} tensors that config.json doesn't account for, first: {surplus[0]}"
        )
    for name, shape in expected.items():
        found = tensors[name]
        if found.shape != shape:
            raise UserInputError(
                f"{root / found.file}: {name} has shape {list(found.shape)}, but config.json makes it {list(shape)}"
            )
        if found.dtype not in SOURCE_DTYPES:
            raise UserInputError(
                f"{root / found.file}: {name} has dtype {found.dtype}; allowed: {', '.join(SOURCE_DTYPES)}"
            )
