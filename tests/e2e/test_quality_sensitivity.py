"""Does the quality gate see what it must, on the real engine? A damaged layer is a NO-GO, the reference run again a GO.

The gate, the statistics and the token stream are the ones of the stage; only the eval set is a smaller sample, almost without
long prompts, and the damaged model's run may stop at its first look, so that three runs fit in minutes.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.quality.divergence import ScoredStream, diverge
from pipeline.quality.evalset import load_items, sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, Scores, run_quality
from pipeline.quality.sequential import plan_looks
from pipeline.quality.statistics import compare, non_inferiority
from pipeline.quality.stream import StreamClient, make_stream, score_stream, stream_of
from pipeline.results import Sample
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.server import Server, serve
from pipeline.verdict.policy import Policy
from pipeline.verdict.quality import Evidence, divergence_gates, quality_gate
from tests.support.environments import environment_python
from tests.support.patience import ENGINE_START_S

ROOT = Path(__file__).resolve().parents[2]
SET = ROOT / "evalsets/team-demo"
MARGIN, CONFIDENCE = 0.03, 0.95
ITEMS = 146  # a sample without a flip excludes a loss of 2.6 points; with the one long prompt that a sample must hold
DAMAGED = "model.layers.3."
LOOKS = plan_looks(ITEMS, 2, CONFIDENCE, "pocock")
POLICY = Policy(required_sequences=1, quality_margin=MARGIN, confidence=CONFIDENCE, max_kl=0.5)


def damage(model: Path, target: Path) -> Path:
    """A copy of the checkpoint in which the linear weights of one layer are noise of the same size."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    rng = np.random.default_rng(5)
    damaged = 0
    for name, tensor in json.loads(content[8 : 8 + length]).items():
        if not name.startswith(DAMAGED) or "_proj.weight" not in name:
            continue
        assert tensor["dtype"] == "BF16"
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        # bfloat16 is the upper half of a float32
        values = (np.frombuffer(content[start:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        noise = rng.normal(0, values.std(), values.shape).astype(np.float32)
        content[start:end] = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        damaged += 1
    assert damaged == 7  # q, k, v, o, gate, up, down
    path.write_bytes(content)
    return target


def _spec(model: Path) -> ServeSpec:
    return ServeSpec(
        engine_version=locked_engine()[1],
        model_dir=model, served_name="m", target="cpu", max_model_len=512, max_num_seqs=1,
        kv_cache_memory_bytes=80 * 2**20, block_size=128,
    )  # fmt: skip


def _scores(server: Server, model: Path, folder: Path, reference: Sequence[Sample] | None = None) -> Scores:
    """All items, or with a `reference` those up to the look that decides."""

    def decided(samples: Sequence[Sample]) -> bool:
        assert reference is not None
        delta = compare(reference, samples, margin=MARGIN, confidence=CONFIDENCE, looks=LOOKS)
        return delta.delta_ci is not None and non_inferiority(delta.delta_ci, MARGIN) != "INCONCLUSIVE"

    run = EvalRun(
        SET,
        "team_demo",
        ITEMS,
        seed=3,
        concurrency=8,
        slice_items={"long_context": 1},
        looks=len(LOOKS.items),
    )
    hooks = Hooks(server.check, decided=None if reference is None else decided)
    return run_quality(run, Endpoint(server.base_url, "m", model, 512), folder, hooks)


def _client(server: Server) -> StreamClient:
    return StreamClient(server.base_url, "m", 8, 0, server.check)


@pytest.fixture(scope="module")
def runs(
    prepared_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Sample], ScoredStream]]:
    """Samples and scored stream of the reference, of the reference asked again, and of the damaged model."""
    folder = tmp_path_factory.mktemp("sensitivity")
    found: dict[str, tuple[list[Sample], ScoredStream]] = {}
    with serve(
        _spec(prepared_model), environment_python("serve"), folder / "bf16.log", ENGINE_START_S
    ) as server:
        items = sample_items(load_items(SET / "items.jsonl"), 12, 3, {"long_context": 1})
        stream = make_stream(_client(server), items, 4)
        for name in ("bf16", "bf16-again"):
            scores = _scores(server, prepared_model, folder / name)
            found[name] = scores.samples, score_stream(_client(server), stream, 20)
    damaged = damage(prepared_model, folder / "damaged")
    with serve(_spec(damaged), environment_python("serve"), folder / "damaged.log", ENGINE_START_S) as server:
        scores = _scores(server, damaged, folder / "scores", found["bf16"][0])
        tokens = stream_of(found["bf16"][1])
        found["damaged"] = scores.samples, score_stream(_client(server), tokens, 20)
    return found


def test_the_reference_run_again_is_a_go(runs: dict[str, tuple[list[Sample], ScoredStream]]) -> None:
    delta = compare(runs["bf16"][0], runs["bf16-again"][0], margin=MARGIN, confidence=CONFIDENCE)
    gate = quality_gate(delta, None, MARGIN)
    assert gate.decision == "GO", gate.why
    assert (delta.flips, delta.changed_answers) == (0, 0)
    again = diverge(runs["bf16"][1], runs["bf16-again"][1], CONFIDENCE)
    assert again.kl.value < 1e-6 and again.same_top1.value == 1.0


def test_a_damaged_layer_is_a_no_go(runs: dict[str, tuple[list[Sample], ScoredStream]]) -> None:
    delta = compare(
        runs["bf16"][0],
        runs["damaged"][0],
        margin=MARGIN,
        confidence=CONFIDENCE,
        control=runs["bf16-again"][0],
        looks=LOOKS,  # it stopped at the look that decided
    )
    gate = quality_gate(delta, None, MARGIN)
    assert gate.decision == "NO-GO", gate.why
    assert delta.within_noise is False
    divergence = diverge(runs["bf16"][1], runs["damaged"][1], CONFIDENCE)
    (kl,) = divergence_gates(Evidence(True, delta, divergence=divergence), POLICY)
    assert kl.decision == "NO-GO", kl.why
    assert divergence.perplexity_ratio.value > 1.5
