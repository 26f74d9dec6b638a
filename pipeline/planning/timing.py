"""How long a profile takes on its card, stage by stage and variant by variant, before anything has run.

An estimate from the model's geometry, the card's data sheet, the load and the eval set; every constant that isn't arithmetic
carries its source. It is meant to be on the slow side where a choice had to be made, and nothing of it was measured on a card.
None where the device gives no bandwidth and TFLOPS: a CPU's speed isn't known from a data sheet.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.capacity import BF16, Card, Geometry, Row, weight_bytes
from pipeline.capacity.layers import Attention
from pipeline.environments.needed import environments_of
from pipeline.errors import UserInputError
from pipeline.load.slo import search_plans, slo_of
from pipeline.planning.card import card_of
from pipeline.planning.load_time import LoadTime, load_time
from pipeline.planning.record import record_of
from pipeline.planning.roofline import Lengths, Roofline
from pipeline.planning.scenario import geometry_of, row_of, scheme_of
from pipeline.planning.scoring_lengths import Scored, scored_tasks
from pipeline.quality.batching import batching_of
from pipeline.quality.sequential import critical_values, plan_looks
from pipeline.settings import Settings
from pipeline.settings.schema import HubSource, QuantizeRecipe, VariantSettings

DOWNLOAD_BYTES_S = 100e6 / 8
"""A line of 100 Mbit/s."""
DISK_BYTES_S = 0.5e9
"""Reading or writing checkpoints: a SATA SSD's. vLLM's own logs have 0.3 GB/s (vllm-project/vllm#44106: 7.64 GiB in 27 s) to 4
GB/s from the page cache (tests/contract/recorded/log-0.24-rtx4090-qwen25-7b-bf16.txt)."""
DISK_PASSES = 4
"""Over a checkpoint that a stage makes: written, read for the proof or the check, hashed by DVC, copied into its cache."""
ENVIRONMENT_GB = {"orchestrator": 0.5, "serve-cuda": 4.4, "autoawq-cuda": 0.1, "llmcompressor-cuda": 0.1}
"""Of wheels that the ones before don't have (torch and CUDA's libraries come once), by the index; another environment counts as
the largest."""
INSTALL_S, INSTALL_S_PER_GB = 15.0, 10.0
"""Unpacking and linking one of them, and by its wheels' size: 9 to 25 s were measured of environments of 0.1 to 1 GB of wheels, the
imports that prove them included (2 cores, uv 0.13.9, 2026-12-01)."""
IMPORTS_S = 25.0
"""API server, engine core and worker, one after the other: 22 to 24 s (measured, 2 cores, vLLM 0.32, 2026-12-01)."""
CAPTURE_S = 15.0
COMPILE_S = 25.0
"""CUDA graphs; torch.compile of an 8B model the first time a variant starts, from its cache later (vllm-project/vllm#11005)."""
KERNELS_S = 150.0
"""FlashInfer compiling its modules, once on a machine: 149 CPU seconds for FP8 KV, 121 for BF16 (`make card-check`, 2026-12-01), on one
core."""
AUTOAWQ_S = 15 * 60.0
"""A 7B model: "10-15 minutes" (AutoAWQ 0.2.9, README)."""
AUTOAWQ_PARAMETERS = 7e9
LLMCOMPRESSOR_S = {"rounding": 60.0, "passes": 19 * 60.0, "search": 10 * 60.0}
"""Llama-3-8B on an A100 (llm-compressor 0.11 docs, guides/runtime): rounding weights about 1 minute, with activations calibrated
on top 20, AWQ or GPTQ 30. So passes over the calibration text are taken as 19 minutes, which grow with its tokens, and the
search as 10, which is left as it is on fewer tokens."""
LLMCOMPRESSOR_PARAMETERS = 8e9
LLMCOMPRESSOR_TOKENS = 512 * 2048
"""The text that llm-compressor's examples calibrate on."""
REQUEST_S = 0.005
"""Of each scored request outside the card. lm-eval's client and a Python server took 1.7 ms together (measured, 2 busy cores,
2026-12-01, 1,600 choices at 32 and at 128 in flight); the engine's own server is taken at twice that."""
STREAM_PROMPT_S = 0.36
"""Of each prompt of the token stream, on the slow side: 140 took 50 s with the model's own time (measured, 2 cores)."""
FLIPS = 0.05
"""Share of the answers that differ, for when a sequential run stops; the example in README."""
FINISH_S = 24.0
"""Verdict, report, track, show (measured, 2 cores)."""
STAGE_S = 2.5
"""DVC's and a stage's own start (measured, 2 cores)."""


@dataclass(frozen=True)
class VariantTime:
    """Seconds of one variant: `measure` is a start and the load, `quality` a start, the tasks and the token stream."""

    variant: str
    start_s: float
    load: LoadTime
    tasks_s: dict[str, float]
    stream_s: float

    @property
    def first_start_s(self) -> float:
        """`measure` comes first, and compiles."""
        return self.start_s + COMPILE_S

    @property
    def measure_s(self) -> float:
        return self.first_start_s + self.load.total_s + STAGE_S

    @property
    def quality_s(self) -> float:
        return self.start_s + sum(self.tasks_s.values()) + self.stream_s + STAGE_S


@dataclass(frozen=True)
class ProfileTime:
    """Seconds of a whole profile."""

    environments_s: dict[str, float]
    prepare_s: float
    quantize_s: dict[str, float]
    kernels_s: float
    variants: tuple[VariantTime, ...]

    @property
    def quantize_s_total(self) -> float:
        return sum(self.quantize_s.values())

    @property
    def measure_s(self) -> float:
        return self.kernels_s + sum(variant.measure_s for variant in self.variants)

    @property
    def quality_s(self) -> float:
        return sum(variant.quality_s for variant in self.variants)

    @property
    def total_s(self) -> float:
        made = sum(self.environments_s.values()) + self.prepare_s + self.quantize_s_total
        return made + self.measure_s + self.quality_s + FINISH_S

    def as_json(self) -> dict[str, Any]:
        """Seconds by stage, and by variant with their parts."""
        stages = {
            "environments": sum(self.environments_s.values()),
            "prepare": self.prepare_s,
            "quantize": self.quantize_s_total,
            "measure": self.measure_s,
            "quality": self.quality_s,
            "all": self.total_s,
        }
        return {
            "stages_s": {name: round(seconds) for name, seconds in stages.items()},
            "schemes_s": {name: round(seconds) for name, seconds in self.quantize_s.items()},
            "variants": [
                {
                    "variant": one.variant,
                    "measure_s": round(one.measure_s),
                    "quality_s": round(one.quality_s),
                    "start_s": round(one.start_s),
                    "load_s": {name: round(seconds) for name, seconds in asdict(one.load).items()},
                    "tasks_s": {name: round(seconds) for name, seconds in one.tasks_s.items()},
                    "stream_s": round(one.stream_s),
                }
                for one in self.variants
            ],
            "measured": False,
        }


def profile_time(settings: Settings) -> ProfileTime | None:
    """The estimate; None where the device isn't one whose speed is known. `UserInputError` names a file that can't be read."""
    device = settings.device
    if device.memory_bandwidth_gb_s is None or device.dense_16bit_tflops is None:
        return None
    geometry = geometry_of(settings)
    tasks = scored_tasks(settings.evalset)
    return ProfileTime(
        {name: _environment_s(name) for name in environments_of(settings)},
        _prepare_s(settings, geometry),
        {name: _quantize_s(settings, geometry, name) for name in settings.quantizers},
        KERNELS_S if device.kind == "cuda" else 0.0,
        tuple(
            _variant_time(settings, variant, geometry, card_of(settings, variant), tasks)
            for variant in settings.variants.values()
        ),
    )


def _environment_s(name: str) -> float:
    size = ENVIRONMENT_GB.get(name, max(ENVIRONMENT_GB.values()))
    return size * 1e9 / DOWNLOAD_BYTES_S + INSTALL_S + INSTALL_S_PER_GB * size


def _prepare_s(settings: Settings, geometry: Geometry) -> float:
    size = weight_bytes(geometry, BF16)
    fetched = size / DOWNLOAD_BYTES_S if isinstance(settings.model.source, HubSource) else 0.0
    return fetched + DISK_PASSES * size / DISK_BYTES_S + STAGE_S


def _quantize_s(settings: Settings, geometry: Geometry, name: str) -> float:
    """Loading the model, the backend's own time by the model's size, and the disk's."""
    recipe = settings.quantizers[name]
    original, made = weight_bytes(geometry, BF16), weight_bytes(geometry, scheme_of(settings, name))
    # The proof reads both again for their perplexities.
    disk = (2 * original + (DISK_PASSES + 1) * made) / DISK_BYTES_S
    return disk + _backend_s(recipe, original / 2) + STAGE_S


def _backend_s(recipe: QuantizeRecipe, parameters: float) -> float:
    if recipe.backend == "autoawq":
        return AUTOAWQ_S * parameters / AUTOAWQ_PARAMETERS
    passes = LLMCOMPRESSOR_S["passes"] * recipe.samples * recipe.sequence_tokens / LLMCOMPRESSOR_TOKENS
    search = LLMCOMPRESSOR_S["search"] if recipe.bits == 4 else 0.0
    return (LLMCOMPRESSOR_S["rounding"] + passes + search) * parameters / LLMCOMPRESSOR_PARAMETERS


def _variant_time(
    settings: Settings,
    variant: VariantSettings,
    geometry: Geometry,
    card: Card,
    tasks: list[Scored],
) -> VariantTime:
    row = row_of(settings, variant, geometry, card)
    engine = engine_of(settings, geometry, row)
    start_s = (
        IMPORTS_S + row.weight_bytes / DISK_BYTES_S + (0.0 if settings.server.enforce_eager else CAPTURE_S)
    )
    capacity = record_of(settings, variant, row, card).capacity
    load = load_time(
        settings.load, settings.server, slo_of(settings), search_plans(settings), engine, capacity
    )
    return VariantTime(
        variant.name,
        start_s,
        load,
        {task.task: _task_s(settings, variant.name, task, engine) for task in tasks},
        _stream_s(settings, variant.name, tasks[0], engine),
    )


def engine_of(settings: Settings, geometry: Geometry, row: Row) -> Roofline:
    """A variant's roofline. Every weight is read in each step but the input embeddings, of which a step takes a few rows."""
    device, cards = settings.device, settings.server.tensor_parallel
    assert device.memory_bandwidth_gb_s is not None and device.dense_16bit_tflops is not None
    table = 2 * geometry.vocabulary * geometry.hidden
    active = _active_parameters(settings, geometry)
    return Roofline(
        weight_bytes=cards * row.weight_bytes - (0 if geometry.tied_embeddings else table),
        flops_per_token=2.0 * active,
        flops_per_pair=4.0 * _attention_width(geometry),
        kv_bytes_per_token=cards * row.kappa_bytes,
        pool_tokens=row.pool.tokens,
        bandwidth_bytes_s=cards * device.memory_bandwidth_gb_s * 1e9,
        flops_s=cards * device.dense_16bit_tflops * 1e12,
    )


def _active_parameters(settings: Settings, geometry: Geometry) -> float:
    """Of the linear layers that one token goes through, and the output head; of a router's experts those it takes."""
    config = settings.model.config or {}
    taken = config.get("num_experts_per_tok") or config.get("experts_per_token")
    total = 0.0
    for layer in geometry.layers:
        experts = layer.feed_forward.experts if layer.feed_forward is not None else 0
        share = min(1.0, int(taken) / experts) if experts and taken else 1.0
        for linear in layer.linears(geometry.hidden):
            total += math.prod(linear.shape) * (share if ".experts." in linear.name else 1.0)
    return total + geometry.vocabulary * geometry.hidden


def _attention_width(geometry: Geometry) -> int:
    """Over the layers with attention over the whole context: heads times their width."""
    mixers = (layer.mixer for layer in geometry.layers)
    return sum(
        mixer.heads * mixer.head_dim
        for mixer in mixers
        if isinstance(mixer, Attention) and mixer.window is None
    )


def _task_s(settings: Settings, name: str, task: Scored, engine: Roofline) -> float:
    """One task through the served variant, in batches as deployed or one sequence at a time."""
    share = _share_scored(settings, name, task)
    requests = math.ceil(task.requests * share)
    return requests * REQUEST_S + engine.drained_s(requests, _at_once(settings), task.lengths)


def _at_once(settings: Settings) -> int:
    """Items that are scored together."""
    return batching_of(settings.evalset.batching, settings.server.max_num_seqs).max_num_seqs


def _share_scored(settings: Settings, name: str, task: Scored) -> float:
    """Of the items, where the run looks in between: until a variant that loses nothing is shown to be within the margin.

    Reference and control score everything. At share `FLIPS` of flips the paired difference of n items has a standard error of
    sqrt(FLIPS / n), which the look's bound times over must be within the margin.
    """
    evalset, policy = settings.evalset, settings.policy
    if evalset.looks == 1 or name in (settings.reference, settings.control):
        return 1.0
    looks = plan_looks(task.items, evalset.looks, policy.confidence, evalset.spending)
    margin = policy.task_margins.get(task.task, policy.quality_margin)
    for items, bound in zip(looks.items, critical_values(looks), strict=True):
        if bound * math.sqrt(FLIPS / items) <= margin:
            return items / task.items
    return 1.0


def _stream_s(settings: Settings, name: str, task: Scored, engine: Roofline) -> float:
    """The reference generates the stream first; everyone scores it."""
    wanted = settings.evalset.divergence
    if wanted is None or settings.evalset.folder is None:
        return 0.0
    prompt = task.lengths.prompt
    scored = Lengths.of([prompt + wanted.continuation_tokens], [1])
    found = wanted.prompts * STREAM_PROMPT_S + engine.drained_s(wanted.prompts, _at_once(settings), scored)
    if name == settings.reference:
        made = Lengths.of([prompt], [wanted.continuation_tokens])
        found += engine.drained_s(wanted.prompts, _at_once(settings), made)
    return found


def guarded_time(settings: Settings) -> tuple[ProfileTime | None, str]:
    """The estimate, or None and why there is none: a plan isn't refused for what only its time depends on."""
    try:
        found = profile_time(settings)
    except UserInputError as error:
        return None, f"not estimated: {error}"
    if found is None:
        return (
            None,
            f"not estimated: the device {settings.device.name} gives no memory bandwidth and TFLOPS",
        )
    return found, "computed; none of it measured on a card"
