"""Calibrated FP8 KV scales against scale 1.0 on the real engine, on a model where it matters.

The model is the demo's with its keys and values made 512 times larger and everything that reads them 512 times smaller: the same
function, and in BF16 the same numbers, because a power of two only moves exponents. An FP8 cache at scale 1.0 saturates at 448,
which is most of them now; with calibrated scales nothing is lost but FP8's own rounding. Qwen2.5 is known for such keys.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import EngineFailedError
from pipeline.quality.divergence import diverge
from pipeline.quality.evalset import load_items, sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, run_quality
from pipeline.quality.statistics import compare
from pipeline.quality.stream import ScoredStream, StreamClient, make_stream, score_stream, stream_of
from pipeline.quantize.base import QuantizeRequest, quantize
from pipeline.results import ModuleCount, Quantization, Sample
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.kv_scales import check_kv_cache, checkpoint_scales
from pipeline.serving.server import serve
from pipeline.serving.signals import LogSignals, parse_log
from pipeline.settings.schema import QuantizeRecipe
from pipeline.verdict.policy import Policy
from pipeline.verdict.quality import Evidence, divergence_gates, quality_gate
from tests.support.environments import environment_python
from tests.support.patience import ENGINE_START_S

ROOT = Path(__file__).resolve().parents[2]
SET = ROOT / "evalsets/team-demo"
LOUDER = 512.0
# Exact in BF16. The rotary embedding turns keys without changing their size.
FACTORS = {"k_proj": LOUDER, "q_proj": 1 / LOUDER, "v_proj": LOUDER, "o_proj": 1 / LOUDER}
# Seen: -35 points and a KL divergence of 1.3 at scale 1.0, -1.2 points and 0.013 with calibrated scales.
ITEMS, MARGIN, CONFIDENCE = 80, 0.12, 0.95
POLICY = Policy(required_sequences=1, quality_margin=MARGIN, confidence=CONFIDENCE, max_kl=0.5)
RECIPE = QuantizeRecipe(
    backend="llmcompressor", bits=16, group_size=None, calibrate_kv_scales=True, clip_search=False, samples=8, sequence_tokens=128
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What one served variant said and answered."""

    log: LogSignals
    samples: list[Sample]
    stream: ScoredStream


def make_loud(model: Path, target: Path) -> Path:
    """A copy of the BF16 checkpoint with `FACTORS` applied."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    changed = 0
    for name, tensor in json.loads(content[8 : 8 + length]).items():
        factor = FACTORS.get(name.removesuffix(".weight").rsplit(".", 1)[-1])
        if factor is None:
            continue
        assert tensor["dtype"] == "BF16"
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        # bfloat16 is the upper half of a float32
        values = (np.frombuffer(content[start:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        content[start:end] = ((values * factor).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        changed += 1
    assert changed == 30 * len(FACTORS)
    path.write_bytes(content)
    return target


def run(model: Path, kv_cache_dtype: str, folder: Path, reference: ScoredStream | None = None) -> Run:
    """Serve, score the sample, score the token stream (the reference makes it)."""
    spec = ServeSpec(
        model_dir=model, served_name="m", target="cpu", max_model_len=512, max_num_seqs=16, kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=80 * 2**20, block_size=128, engine_version=locked_engine()[1],
    )  # fmt: skip
    with serve(spec, environment_python("serve"), folder / "serve.log", ENGINE_START_S) as server:
        asked = EvalRun(SET, "team_demo", ITEMS, seed=3, concurrency=32, slice_items={"long_context": 1})
        endpoint = Endpoint(server.base_url, "m", model, 512)
        scores = run_quality(asked, endpoint, folder / "scores", Hooks(server.check))
        client = StreamClient(server.base_url, "m", 32, 0, server.check)
        if reference is None:
            tokens = make_stream(
                client, sample_items(load_items(SET / "items.jsonl"), 12, 3, {"long_context": 1}), 4
            )
        else:
            tokens = stream_of(reference)
        stream = score_stream(client, tokens, 20)
        return Run(parse_log(server.log_text()), scores.samples, stream)


@pytest.fixture(scope="module")
def loud(prepared_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Quantization]:
    """The loud model, the same with calibrated scales, and the record of their calibration."""
    folder = tmp_path_factory.mktemp("loud")
    plain = make_loud(prepared_model, folder / "plain")
    request = QuantizeRequest(
        scheme="calibrated",
        model_dir=plain,
        out_dir=folder / "calibrated",
        calibration_file=ROOT / "evalsets/calibration/calibration.jsonl",
        heldout_file=ROOT / "evalsets/calibration/heldout.jsonl",
        recipe=RECIPE,
    )
    record = quantize(request, environment_python("llmcompressor"), log_path=folder / "quantize.log")
    return plain, folder / "calibrated", record


@pytest.fixture(scope="module")
def runs(loud: tuple[Path, Path, Quantization], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The reference is served from the checkpoint with scales: a BF16 cache that was asked for must stay one."""
    plain, calibrated, _ = loud
    folder = tmp_path_factory.mktemp("runs")
    found = {"bf16": run(calibrated, "bfloat16", folder / "bf16")}
    stream = found["bf16"].stream
    found["one"] = run(plain, "fp8", folder / "one", stream)
    found["checkpoint"] = run(calibrated, "fp8", folder / "checkpoint", stream)
    return found


def test_calibration_finds_the_loud_keys_and_leaves_the_weights(
    loud: tuple[Path, Path, Quantization],
) -> None:
    plain, calibrated, record = loud
    found = record.kv_scales
    assert found is not None
    assert found.layers == 30
    assert min(found.largest_key, found.largest_value) > 4 * 448, "scale 1.0 has to saturate here"
    assert record.perplexity.ratio == pytest.approx(1.0, abs=1e-3)
    assert record.quantized_modules == ModuleCount(expected=0, found=0, missing=[])
    assert record.weight_bytes == record.predicted_weight_bytes == record.original_weight_bytes + 30 * 2 * 2
    assert checkpoint_scales(plain) == {}
    assert len(checkpoint_scales(calibrated)) == 30


def test_engine_takes_what_each_variant_means(
    runs: dict[str, Run], loud: tuple[Path, Path, Quantization]
) -> None:
    plain, calibrated, _ = loud
    log = Path("serve.log")
    assert [runs[name].log.kv_cache_dtype for name in ("bf16", "one", "checkpoint")] == [
        "bfloat16",
        "fp8",
        "fp8",
    ]
    assert [runs[name].log.kv_scales for name in ("bf16", "one", "checkpoint")] == [None, "1.0", "checkpoint"]
    check_kv_cache("bf16", calibrated, "bfloat16", None, runs["bf16"].log, log)
    check_kv_cache("one", plain, "fp8", "one", runs["one"].log, log)
    check_kv_cache("calibrated", calibrated, "fp8", "checkpoint", runs["checkpoint"].log, log)
    with pytest.raises(EngineFailedError, match=r"runs at scale 1\.0"):
        check_kv_cache("calibrated", calibrated, "fp8", "checkpoint", runs["one"].log, log)
    with pytest.raises(EngineFailedError, match="took the checkpoint's"):
        check_kv_cache("one", plain, "fp8", "one", runs["checkpoint"].log, log)


def decisions(reference: Run, variant: Run) -> tuple[str, str]:
    """The gates `quality` and `divergence-kl`, with their reasons printed for a failure's report."""
    delta = compare(reference.samples, variant.samples, margin=MARGIN, confidence=CONFIDENCE)
    quality = quality_gate(delta, None, MARGIN)
    divergence = diverge(reference.stream, variant.stream, CONFIDENCE)
    (kl,) = divergence_gates(Evidence(True, delta, divergence=divergence), POLICY)
    print(quality.why, kl.why, sep="\n")
    return quality.decision, kl.decision


def test_scale_one_is_a_no_go(runs: dict[str, Run]) -> None:
    assert decisions(runs["bf16"], runs["one"]) == ("NO-GO", "NO-GO")


def test_calibrated_scales_are_a_go(runs: dict[str, Run]) -> None:
    assert decisions(runs["bf16"], runs["checkpoint"]) == ("GO", "GO")
