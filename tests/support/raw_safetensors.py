"""A safetensors file as bytes, tensor by tensor: numpy has no bfloat16, and the orchestrator no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RawTensor = tuple[str, tuple[int, ...], bytes]
"""Its dtype as the file names it, its shape, its bytes."""


def read_raw(path: Path) -> dict[str, RawTensor]:
    """All tensors by name."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            content[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def write_raw(path: Path, tensors: dict[str, RawTensor]) -> None:
    """The other way round, as PyTorch's files say of themselves."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    )


def times(tensor: RawTensor, factor: float) -> RawTensor:
    """A tensor of F32 or BF16 multiplied by a power of two, which is exact in both."""
    dtype, shape, data = tensor
    if dtype == "F32":
        return dtype, shape, (np.frombuffer(data, np.float32) * np.float32(factor)).tobytes()
    assert dtype == "BF16", dtype
    # bfloat16 is the upper half of a float32
    wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
    return dtype, shape, (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()
