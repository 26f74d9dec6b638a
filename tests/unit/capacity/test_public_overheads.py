"""The overheads' model against public start-ups: terms and pool, fitted on one half and counted on the other, with bands that are
held to a width. A band that is widened to let runs in turns these tests red."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from pipeline.capacity import GIB, Card, EngineRules, Geometry, Term, kv_layout, rank_weight_bytes
from pipeline.capacity.overheads import (
    Constant,
    Constants,
    Drivers,
    cuda_graphs,
    feed_forwards,
    overhead_terms,
)
from pipeline.settings.overheads import OverheadSettings

ROOT = Path(__file__).parents[3]
CONTENT = yaml.safe_load(Path(__file__).with_name("public_overheads.yaml").read_text(encoding="utf-8"))
CARD: dict[str, Any] = CONTENT["card"]
RUNS: list[dict[str, Any]] = CONTENT["runs"]
GEOMETRIES = {name: Geometry.from_config(config, name) for name, config in CONTENT["configs"].items()}
SHARE = 23 / 26
"""The least share of runs inside."""
ROUNDING_GIB = 0.005
OUTSIDE = {
    "meta-llama-llama-3-1-8b---h100-80gb--tp1pp2dp1--8192": 0.07,
    "meta-llama-llama-3-1-8b---h100-80gb--tp1pp4dp1--8192": 0.08,
    "moonshotai-kimi-dev-72b--h100-80gb--tp4pp1dp1--8192": -0.23,
}
"""Runs outside the pool's band, and GiB by which their pool is larger than expected. Two with pipeline ranks: NCCL was there before the
engine looked, and 0.05 less came after. A 72B on four ranks: 0.14 of buffers and 2.21 outside PyTorch, each its band's end."""


def constants(device: str, version: str) -> Constants:
    content = yaml.safe_load((ROOT / "conf" / "overheads" / f"{device}.yaml").read_text(encoding="utf-8"))
    model = OverheadSettings.model_validate(content).model
    assert model is not None
    values = {
        name: Constant(one.value, one.low, one.high) for name, one in model.for_version(version).items()
    }
    return Constants(values, model.multiprocessors)


def drivers(run: Mapping[str, Any]) -> Drivers:
    element_bytes = 4 if run["dtype"] == "float32" else 2
    major, minor = map(int, run["vllm"].split(".")[:2])
    # The backends that the logs name: no FlashAttention 3 for FP32 and for Gemma 3's bidirectional prefix.
    backend = "TRITON_ATTN" if element_bytes == 4 or "gemma-3-" in run["config"] else "FLASH_ATTN"
    return Drivers(
        version=(major, minor),
        max_num_batched_tokens=CARD["max_num_batched_tokens"],
        max_num_seqs=CARD["max_num_seqs"],
        v2=False,
        backend=backend,
        capability=90,
        tensor_parallel=run["tensor_parallel"],
        element_bytes=element_bytes,
        narrow_inputs=run["quantization"] in ("compressed-tensors", "fp8"),
    )


def terms(run: Mapping[str, Any], using: Constants | None = None) -> dict[str, Term]:
    found = using or constants("h100", run["vllm"])
    return {term.name: term for term in overhead_terms(GEOMETRIES[run["config"]], drivers(run), found)}


def weight_bytes(run: Mapping[str, Any]) -> int | None:
    """Computed, as the planner does for 16 bits (twice that in FP32); None where only a checkpoint tells."""
    geometry = GEOMETRIES[run["config"]]
    if run["quantization"] is not None or not geometry.computable_weights:
        return None
    found = max(
        rank_weight_bytes(
            geometry, tensor_parallel=run["tensor_parallel"], pipeline_parallel=run["pipeline_parallel"]
        )
    )
    return found * (2 if run["dtype"] == "float32" else 1)


def pool_gib(run: Mapping[str, Any]) -> tuple[float, float, float]:
    """The planned pool of the tightest rank: low, expected, high. Where the weights are only known as loaded, they have their buffers."""
    overheads = terms(run)
    weights = weight_bytes(run)
    if weights is None:
        weights = int(run["weights_gib"] * GIB)
        overheads.pop("buffers")
    utilization = run.get("utilization", CARD["utilization"])
    card = Card(int(CARD["memory_gib"] * GIB), utilization, tuple(overheads.values()))
    budget = card.budget(weights)
    return budget.low_bytes / GIB, budget.bytes / GIB, budget.high_bytes / GIB


def logged_pool_gib(run: Mapping[str, Any]) -> float:
    """As logged; of several pipeline ranks the log's is the first's, and the tightest one follows from the tokens."""
    if run["pipeline_parallel"] == 1:
        return float(run["kv_gib"])
    rules = EngineRules(tokens_by_blocks=True, concurrent_batches=1)
    layout = kv_layout(GEOMETRIES[run["config"]], "bfloat16", rules, 1, run["pipeline_parallel"])
    return float(run["tokens"]) / layout.block_size * max(layout.block_bytes) / GIB


def inside(run: Mapping[str, Any]) -> bool:
    low, _, high = pool_gib(run)
    return low - 2 * ROUNDING_GIB <= logged_pool_gib(run) <= high + 2 * ROUNDING_GIB


@pytest.mark.parametrize("half", ["fit", "check"])
def test_the_pool_of_most_runs_lies_in_the_band(half: str) -> None:
    runs = [run for run in RUNS if run["half"] == half]
    outside = {run["log"] for run in runs if not inside(run)}
    assert len(runs) - len(outside) >= SHARE * len(runs), sorted(outside)
    assert outside <= set(OUTSIDE), sorted(outside)


def test_one_of_each_configuration_says_the_same() -> None:
    """Starts that differ in max_model_len alone count once."""
    keys = ("config", "vllm", "tensor_parallel", "pipeline_parallel", "dtype", "quantization")
    distinct = {tuple(run[key] for key in keys): run for run in RUNS}
    assert len(distinct) >= 30
    assert sum(map(inside, distinct.values())) >= SHARE * len(distinct)


def test_the_pools_band_is_narrow() -> None:
    """GiB from end to end, of pools of 3 to 69."""
    for run in RUNS:
        low, expected, high = pool_gib(run)
        assert high - low <= (0.20 if run["tensor_parallel"] == 1 else 0.30), run["log"]
        away = OUTSIDE.get(run["log"], 0.0)
        assert logged_pool_gib(run) - expected == pytest.approx(away, abs=0.12), run["log"]


WIDTHS_GIB = {"buffers": 0.15, "activation": 0.06, "non_torch": 0.22, "experts": 0.0}


@pytest.mark.parametrize("name", WIDTHS_GIB)
def test_every_terms_band_is_narrow(name: str) -> None:
    widths = [
        (term.high_bytes - term.low_bytes) / GIB for run in RUNS if (term := terms(run).get(name)) is not None
    ]
    assert widths and max(widths) <= WIDTHS_GIB[name] + 1e-6


def computed(values: float = 0.0) -> Constants:
    """The model with nothing beside the computed sizes."""
    none = Constant(values, values, values)
    return Constants(dict.fromkeys(constants("h100", "0.19.0").values, none), 132)


def beside(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    """What a run logged beyond a term's computed size, in the constant's unit; None where it says nothing of it."""

    def activation(run: Mapping[str, Any]) -> float | None:
        found = terms(run, computed())
        if run["pipeline_parallel"] > 1:
            return None  # the log is of the first rank, which doesn't sample
        experts = found["experts"].value_bytes if "experts" in found else 0
        return float(run["activation_gib"]) - (found["activation"].value_bytes + experts) / GIB

    def buffers(run: Mapping[str, Any]) -> float | None:
        weights = weight_bytes(run)
        if weights is None:
            return None
        return float(run["weights_gib"]) - (weights + terms(run, computed())["buffers"].value_bytes) / GIB

    def non_torch(run: Mapping[str, Any]) -> float | None:
        alone = run["tensor_parallel"] == run["pipeline_parallel"] == 1
        return float(run["non_torch_gib"]) if alone and run["vllm"] >= "0.18" else None

    def parallel(run: Mapping[str, Any]) -> float | None:
        return float(run["non_torch_gib"]) - 0.25 if run["tensor_parallel"] > 1 else None

    def graphs(run: Mapping[str, Any]) -> float | None:
        geometry, how = GEOMETRIES[run["config"]], drivers(run)
        # One sample met the allocator's next 20 MiB segment and was multiplied by 50: 1.69 GiB estimated, 0.76 taken.
        odd = run["graphs_estimated_gib"] and run["graphs_estimated_gib"] > 2 * run["graphs_taken_gib"]
        experts = any(one.experts for one in feed_forwards(geometry))
        if not run["graphs_estimated_gib"] or run["pipeline_parallel"] > 1 or experts or odd:
            return None
        held = cuda_graphs(geometry, how, computed()).value_bytes / GIB
        count = (len(how.capture_sizes) + how.decode_captures) * len(geometry.layers)
        return 1024 * (float(run["graphs_estimated_gib"]) - held) / count

    return {
        "workspace_gib": activation, "buffers_gib": buffers, "non_torch_gib": non_torch, "parallel_gib": parallel,
        "graph_layer_mib": graphs,
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "slack"),
    [
        ("workspace_gib", 0.02), ("buffers_gib", 0.02), ("non_torch_gib", 0.03), ("parallel_gib", 0.03), ("graph_layer_mib", 0.01),
    ],
)  # fmt: skip
def test_constants_are_those_of_the_half_they_are_fitted_on(name: str, slack: float) -> None:
    """The value is the half's middle, the band what it holds and no more than `slack` beyond; the other half then lies inside."""
    constant, how = constants("h100", "0.19.0")[name], beside(name)
    found = {
        half: [value for run in RUNS if run["half"] == half and (value := how(run)) is not None]
        for half in ("fit", "check")
    }
    assert constant.value == pytest.approx(
        median(found["fit"]), abs=0.06 if name == "parallel_gib" else 0.021
    )
    low, high = min(found["fit"]), max(found["fit"])
    assert constant.low - ROUNDING_GIB <= low <= constant.low + slack
    assert constant.high - slack <= high <= constant.high + ROUNDING_GIB
    within = [
        constant.low - ROUNDING_GIB <= value <= constant.high + ROUNDING_GIB for value in found["check"]
    ]
    assert sum(within) >= SHARE * len(within), sorted(found["check"])


def test_the_model_is_not_the_constants() -> None:
    """Without what drives it the same band misses nearly all: 2.21 GiB of Qwen2.5-7B for every model."""
    fixed = next(run for run in RUNS if run["config"] == "Qwen2.5-7B")["activation_gib"]
    others = [run for run in RUNS if run["config"] != "Qwen2.5-7B"]
    assert sum(abs(run["activation_gib"] - fixed) <= 0.035 for run in others) < 0.2 * len(others)


def test_a_4090_of_another_version_lies_in_its_band() -> None:
    """[1] of conf/overheads/rtx4090.yaml: vLLM 0.24 with V1, 256 sequences, graphs counted; 4.45 GiB logged, 4.47 planned."""
    geometry = GEOMETRIES["Qwen2.5-7B"]
    how = Drivers((0, 24), 2048, 256, v2=False, backend="FLASH_ATTN", capability=89)
    found = overhead_terms(geometry, how, constants("rtx4090", "0.24.0"))
    budget = Card(int(23.64 * GIB), 0.85, found).budget(rank_weight_bytes(geometry)[0])
    assert budget.bytes / GIB == pytest.approx(4.45, abs=0.1)
    assert budget.low_bytes / GIB < 4.45 < budget.high_bytes / GIB
    graphs = next(term for term in found if term.name == "cuda_graphs")
    assert graphs.low_bytes / GIB < 0.53 < graphs.high_bytes / GIB
