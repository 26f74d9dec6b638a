"""The engine's KV cache against the variant's: every way in which the two can differ is named, and what agrees passes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.serving.kv_scales import check_kv_cache, checkpoint_scales
from pipeline.serving.signals import LogSignals, parse_log

STORED = {0: (0.0625, 0.125), 1: (0.5, 2.0)}  # exact in every float format
LAYER = "model.layers.{}.self_attn"


def write_checkpoint(folder: Path, scales: dict[int, tuple[float, float]], dtype: str = "BF16") -> Path:
    """A checkpoint of nothing but scales. BF16 has no struct code: it is the upper half of a float32."""
    header, data = {}, b""
    for layer, pair in scales.items():
        for part, value in zip("kv", pair):
            raw = {
                "BF16": struct.pack("<f", value)[2:],
                "F16": struct.pack("<e", value),
                "F32": struct.pack("<f", value),
            }
            start, data = len(data), data + raw[dtype]
            name = f"{LAYER.format(layer)}.{part}_scale"
            header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def engine(
    scales: dict[int, tuple[float, float]], dtype: str = "fp8", apart: tuple[str, ...] = ()
) -> LogSignals:
    """What the log says of an engine with these scales."""
    values = [value for pair in scales.values() for value in pair]
    probe = {
        "kv_cache_dtype": {dtype: len(scales)},
        "kv_scale_min": min(values),
        "kv_scale_max": max(values),
        "kv_scales": {f"{LAYER.format(layer)}.attn": list(pair) for layer, pair in scales.items()},
        "kv_scales_apart": list(apart),
    }
    return parse_log(f"INFO quantgate-provenance: {json.dumps(probe)}")


ONES = {0: (1.0, 1.0), 1: (1.0, 1.0)}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_scales_are_read_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    found = checkpoint_scales(write_checkpoint(tmp_path, STORED, dtype))
    assert found == {LAYER.format(layer): pair for layer, pair in STORED.items()}


def test_a_scale_per_head_is_refused(tmp_path: Path) -> None:
    header = {"x.k_scale": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(UserInputError, match=r"x\.k_scale is F32 of shape \[3\]"):
        checkpoint_scales(tmp_path)


@pytest.mark.parametrize(
    ("means", "log"),
    [
        (("fp8", "checkpoint"), engine(STORED)),
        (("fp8", "one"), engine(ONES)),
        (("bfloat16", None), engine(ONES, "bfloat16")),
        (("fp8", "one"), engine(ONES, "fp8_e4m3")),
        (("fp8_per_token_head", None), engine(ONES, "fp8_per_token_head")),
        (("fp8", "checkpoint"), parse_log("")),  # says nothing: the gate's affair
    ],
)
def test_what_the_variant_means_passes(tmp_path: Path, means: Any, log: LogSignals) -> None:
    check_kv_cache("v", write_checkpoint(tmp_path, STORED), *means, log, Path("log"))


@pytest.mark.parametrize(
    ("means", "log", "message"),
    [
        (("fp8", "checkpoint"), engine(ONES), "means calibrated KV scales .* runs at scale 1.0"),
        (("fp8", "one"), engine(STORED), "means KV scales of 1.0 .* took the checkpoint's"),
        (("bfloat16", None), engine(STORED), "means a bfloat16 KV cache, but the engine took fp8"),
        (
            ("fp8", "checkpoint"),
            engine(ONES, "bfloat16"),
            "means a fp8 KV cache, but the engine took bfloat16",
        ),
        (("fp8", "one"), engine(ONES, "fp8_per_token_head"), "but the engine took fp8_per_token_head"),
        (
            ("fp8", "checkpoint"),
            engine({**STORED, 1: (0.5, 1.0)}),
            r"layers\.1\.self_attn\.v_scale is 2 in .*, but 1 in the engine",
        ),
        (("fp8", "checkpoint"), engine({0: STORED[0]}), "KV scales of 1 layers, .* of 2"),
        (
            ("fp8", "checkpoint"),
            engine(STORED, apart=("model.layers.0.self_attn.attn",)),
            "two different KV scales for model.layers.0",
        ),
    ],
)
def test_what_it_does_not_mean_fails(tmp_path: Path, means: Any, log: LogSignals, message: str) -> None:
    with pytest.raises(EngineFailedError, match=f"^v: .*{message}.*its log is log"):
        check_kv_cache("v", write_checkpoint(tmp_path, STORED), *means, log, Path("log"))


def test_the_engines_own_warning_is_enough() -> None:
    """Without the probe (a card whose plugin is off) the log's line says it."""
    log = parse_log("Initializing a V1 LLM engine (v0.32.0) with config: kv_cache_dtype=fp8, quantization=fp8\n"
                    "WARNING Using KV cache scaling factor 1.0 for fp8_e4m3.")  # fmt: skip
    with pytest.raises(EngineFailedError, match=r"runs at scale 1\.0"):
        check_kv_cache("v", Path("folder"), "fp8", "checkpoint", log, Path("log"))
