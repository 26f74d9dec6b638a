"""A start of the engine with random weights of a profile's real geometry, and the record that it leaves for `quantgate calibrate`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.capacity import Geometry
from pipeline.capacity.reconcile import reconcile
from pipeline.environments.needed import environments_of
from pipeline.planning.card import card_of
from pipeline.planning.reconciliation import budget_terms, terms_of
from pipeline.planning.record import record_of
from pipeline.planning.scenario import row_of
from pipeline.results import MemoryRun, PlanRow
from pipeline.serving.command import ServeSpec
from pipeline.serving.provenance import provenance
from pipeline.serving.server import Server, serve
from pipeline.serving.signals import parse_log, parse_metrics, reported_capacity
from pipeline.settings import Settings, load_settings
from pipeline.stages.context import serve_spec
from pipeline.stages.environment import describe_machine
from tests.support.checkpoint_configs import quantization_config
from tests.support.tiny_models import write_tokenizer

MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


PROFILE = "rtx4090"
VARIANTS = (
    "bf16", "bf16-fp8kv", "awq", "awq-pinned", "awq-fp8kv", "awq-triton", "awq-kv-per-token-head", "gptq", "fp8",
)  # fmt: skip
"""Those whose checkpoint has no KV scales; the control would be the reference again."""


def card_settings(root: Path, *overrides: str) -> Settings:
    """The card's profile with `VARIANTS`, some of which only its full form has: the records are of one card all the same."""
    full = load_settings(["profile=rtx4090-full"], root)
    names = ",".join([*VARIANTS, "bf16-again"])
    schemes = {full.variants[name].weights for name in VARIANTS} - {"bf16"}
    makers = [f"++quantizer_names.{scheme}={full.quantizers[scheme].name}" for scheme in sorted(schemes)]
    asked = [f"profile={PROFILE}", f"variant_names=[{names}]", *makers]
    return load_settings([*asked, *overrides], root)


def write_checkpoints(settings: Settings, folder: Path) -> None:
    """`artifacts/weights/<scheme>` below `folder` with config and tokenizer, as the stages leave them, but without weights.

    None for schemes with KV scales: random ones would be no scales.
    """
    config: dict[str, Any] = dict(settings.model.config or {})
    # What conf leaves out because memory doesn't depend on it, and the engine asks for.
    config |= {
        "model_type": MODEL_TYPES[config["architectures"][0]], "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "hidden_act": "silu", "bos_token_id": 256, "eos_token_id": 256,
    }  # fmt: skip
    made = {name: recipe for name, recipe in settings.quantizers.items() if not recipe.calibrate_kv_scales}
    for scheme in ("bf16", *made):
        target = folder / "artifacts" / "weights" / scheme
        target.mkdir(parents=True, exist_ok=True)
        write_tokenizer(target)
        quantization = {}
        if scheme in made:
            quantization["quantization_config"] = quantization_config(made[scheme])
        (target / "config.json").write_text(json.dumps(config | quantization))


def planned(settings: Settings, variant: str) -> PlanRow:
    """The planner's record of a variant, with computed weights."""
    geometry = Geometry.from_config(settings.model.config or {})
    wanted = settings.variants[variant]
    card = card_of(settings, wanted)
    return record_of(settings, wanted, row_of(settings, wanted, geometry, card), card)


def dummy_spec(settings: Settings, variant: str, row: PlanRow) -> ServeSpec:
    """How the stage `measure` would serve the variant, with random weights in place of the checkpoint's."""
    machine = describe_machine(environments_of(settings))
    spec = serve_spec(settings, settings.variants[variant], row, machine)
    return replace(spec, extra_args=(*spec.extra_args, "--load-format", "dummy"))


@contextlib.contextmanager
def dummy_server(
    settings: Settings, variant: str, python: Path, log: Path
) -> Iterator[tuple[Server, PlanRow]]:
    """A ready server of a variant, beside its planned row. The working folder must hold `write_checkpoints`' folders."""
    row = planned(settings, variant)
    spec = dummy_spec(settings, variant, row)
    with serve(spec, python, log, settings.server.startup_timeout_s) as server:
        yield server, row


def memory_run(settings: Settings, variant: str, row: PlanRow, server: Server) -> MemoryRun:
    """What a start showed: capacity as reported, every memory term beside the planned one, and where it came from."""
    log = parse_log(server.log_text())
    tokens, sequences = reported_capacity(log, parse_metrics(server.metrics_text()))
    return MemoryRun(
        variant=variant,
        profile=settings.profile,
        weights=row.weights,
        weight_bytes=row.weight_bytes,
        capacity=row.capacity.model_copy(update={"reported_tokens": tokens, "reported_sequences": sequences}),
        reconciliation=budget_terms(reconcile(terms_of(row), log.memory_gib)),
        provenance=provenance(server, log, describe_machine(environments_of(settings))),
        startup_s=server.startup_s,
    )
