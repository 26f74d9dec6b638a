"""Qwen2.5-7B's layer, at its real widths, through each quantizer and into the real engine.

Random weights. Reduced: 1 of 28 layers (what differs between layers is shown by the smaller models of the other tests), and a byte
tokenizer's vocabulary of 264 instead of 152,064 (the embedding isn't quantized, and at 2 x 1.1 GB it would take most of the
memory). Everything that a quantizer or a kernel sees is the 7B's: 3584 and 18944 wide, 28 heads over 4 KV heads of 128, biases on
q, k and v.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.capacity import WeightScheme, weight_bytes
from pipeline.files import read_json
from pipeline.models.architectures import geometry
from pipeline.models.check import read_tensors
from pipeline.quantize.base import QuantizeRequest, quantize
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.kv_scales import check_kv_cache
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from pipeline.settings import load_settings
from pipeline.settings.schema import QuantizeRecipe
from tests.support.environments import environment_python
from tests.support.patience import ENGINE_START_S
from tests.support.tiny_models import VOCAB, prose, write_bf16_model, write_texts

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 1
KAPPA_BYTES = 2 * LAYERS * 4 * 128  # keys and values, 4 heads of 128, one byte each
POOL_BYTES, BLOCK = 16 * 2**20, 128
RECIPE = QuantizeRecipe(
    group_size=128, samples=1, sequence_tokens=64, min_effective_tokens=64, clip_search=False, max_perplexity_ratio=2.0
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dict(load_settings(["profile=rtx4090"], ROOT).model.config or {})
    config |= {
        "model_type": "qwen2", "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_sliding_window": False,
        "bos_token_id": 256, "eos_token_id": 256, "max_position_embeddings": 512,
    }  # fmt: skip
    return write_bf16_model(tmp_path_factory.mktemp("qwen") / "model", config)


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [
        ("autoawq", WeightScheme("awq", 4, 128)),
        ("llmcompressor", WeightScheme("pack-quantized", 4, 128, kv_scales=True)),
    ],
    ids=["autoawq", "llmcompressor"],
)
def test_real_widths_are_quantized_and_served(
    model: Path, tmp_path: Path, backend: str, scheme: WeightScheme
) -> None:
    calibrated = scheme.kv_scales
    out = tmp_path / "out"
    request = QuantizeRequest(
        scheme=backend,
        model_dir=model,
        out_dir=out,
        calibration_file=write_texts(tmp_path / "calibration.jsonl", prose(1, seed=1)),
        heldout_file=write_texts(tmp_path / "heldout.jsonl", prose(2, seed=2)),
        recipe=RECIPE.model_copy(update={"backend": backend, "calibrate_kv_scales": calibrated}),
    )
    record = quantize(request, environment_python(backend), log_path=tmp_path / "quantize.log")
    assert record.quantized_modules.found == 7 * LAYERS
    sizes = geometry(read_json(out / "config.json"))
    assert record.weight_bytes == weight_bytes(sizes, scheme)
    floating = {tensor.dtype for tensor in read_tensors(out).values() if not tensor.dtype.startswith("I")}
    assert floating == ({"BF16"} if backend == "llmcompressor" else {"BF16", "F16"}), (
        "stored as they are served"
    )
    spec = ServeSpec(
        model_dir=out, served_name="qwen", target="cpu", max_model_len=256, max_num_seqs=4, kv_cache_dtype="fp8",
        kv_cache_memory_bytes=POOL_BYTES, block_size=BLOCK, engine_version=locked_engine()[1],
    )  # fmt: skip
    with serve(spec, environment_python("serve"), tmp_path / "serve.log", ENGINE_START_S) as server:
        log = parse_log(server.log_text())
        tokens, _ = reported_capacity(log, parse_metrics(server.metrics_text()))
    assert tokens == POOL_BYTES // (KAPPA_BYTES * BLOCK) * BLOCK
    assert log.weights_kernel is not None
    check_kv_cache("v", out, "fp8", "checkpoint" if calibrated else "one", log, tmp_path / "serve.log")
