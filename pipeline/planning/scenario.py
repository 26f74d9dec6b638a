"""What the settings mean to the capacity arithmetic: the card, the engine's rules, the weights of each scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.capacity import (
    BF16,
    GIB,
    Card,
    EngineRules,
    Geometry,
    HandCalculation,
    Row,
    WeightScheme,
    explain,
    plan_row,
    rank_weight_bytes,
    weight_bytes,
)
from pipeline.capacity.layers import Attention
from pipeline.compatibility import weight_scheme
from pipeline.errors import UserInputError
from pipeline.results import HandRow
from pipeline.settings import Settings, VariantSettings

# vLLM 0.32 engine/arg_utils.py, get_batch_defaults: tokens per scheduler step of the API server where none are asked for.
BATCHED_TOKENS = ((160, 16_384), (70, 8_192), (0, 2_048))
"""(from GiB of device memory, tokens); an A100 keeps the smallest."""
TOKENS_BY_BLOCKS_BEFORE = (0, 26)


def geometry_of(settings: Settings) -> Geometry:
    """The model's geometry as its conf gives it, so that nothing needs to be downloaded."""
    where = f"conf/model/{settings.choices['model']}.yaml: config"
    if settings.model.config is None:
        raise UserInputError(f"{where} is missing; `plan` needs the geometry of the model's config.json")
    return Geometry.from_config(settings.model.config, where)


def head_sizes(geometry: Geometry) -> list[int]:
    """Widths of the attention heads that the model has, narrow ones first."""
    return sorted({layer.mixer.head_dim for layer in geometry.layers if isinstance(layer.mixer, Attention)})


def rules_of(settings: Settings) -> EngineRules:
    """How the engine will count blocks: what is asked for, and its defaults elsewhere."""
    server, on_cpu = settings.server, settings.device.kind == "cpu"
    memory_gib = settings.device.memory_gib
    # A CPU's default is per rank; there the emulated device's memory says nothing.
    default = (
        2_048 * server.tensor_parallel
        if on_cpu
        else next(n for gib, n in BATCHED_TOKENS if memory_gib >= gib)
    )
    if "a100" in settings.device.name.lower():
        default = BATCHED_TOKENS[-1][1]
    return EngineRules(
        block_size=server.block_size,
        kernel_block=32 if on_cpu else 16,
        max_num_batched_tokens=server.max_num_batched_tokens or default,
        concurrent_batches=1 if on_cpu else 1 + server.pipeline_parallel,
        state_element_bytes=4 if on_cpu else 2,
        tokens_by_blocks=tuple(map(int, server.engine_version.split(".")[:2])) < TOKENS_BY_BLOCKS_BEFORE,
    )


def scheme_of(settings: Settings, weights: str) -> WeightScheme:
    """How a weights scheme of the profile is stored."""
    if weights == "bf16":
        return BF16
    return weight_scheme(settings.quantizers[weights])


def rank_weights_of(
    settings: Settings, geometry: Geometry, weights: str, counted_bytes: int | None = None
) -> tuple[int, ...]:
    """Bytes on a rank of each pipeline stage. `counted_bytes`: those of the checkpoint at hand, else computed.

    A counted checkpoint on several cards is shared out as the computed one is.
    """
    server = settings.server
    scheme = scheme_of(settings, weights)
    if server.tensor_parallel * server.pipeline_parallel == 1 and counted_bytes is not None:
        return (counted_bytes,)
    shares = rank_weight_bytes(geometry, scheme, server.tensor_parallel, server.pipeline_parallel)
    if counted_bytes is None:
        return shares
    whole = weight_bytes(geometry, scheme)
    return tuple(round(share * counted_bytes / whole) for share in shares)


def weights_by_cards(
    settings: Settings, geometry: Geometry, counted: Mapping[str, int]
) -> dict[str, Callable[[int], int]]:
    """Scheme -> bytes per rank for a number of tensor-parallel cards, as the levers ask for them."""

    def of(weights: str) -> Callable[[int], int]:
        def on(cards: int) -> int:
            if cards == 1 and weights in counted:
                return counted[weights]
            return rank_weight_bytes(geometry, scheme_of(settings, weights), cards)[0]

        return on

    return {weights: of(weights) for weights in ["bf16", *settings.quantizers]}


def row_of(
    settings: Settings,
    variant: VariantSettings,
    geometry: Geometry,
    card: Card,
    counted_bytes: int | None = None,
) -> Row:
    """The planner's row of a variant. `counted_bytes`: those of the checkpoint at hand, else computed."""
    server = settings.server
    return plan_row(
        variant.name,
        variant.weights,
        variant.kv_cache_dtype,
        geometry,
        rank_weights_of(settings, geometry, variant.weights, counted_bytes),
        card,
        rules_of(settings),
        server.max_model_len,
        server.tensor_parallel,
        variant.skipped_layers,
    )


def by_hand_of(settings: Settings, row: Row, card: Card) -> HandRow | None:
    """The back-of-the-envelope number and its way to the row's, where the profile gives its figures for these weights."""
    hand = settings.hand_calculation
    if hand is None or row.weights not in hand.weights_gib:
        return None
    calculation = HandCalculation(
        int(hand.memory_gib * GIB),
        hand.memory_utilization,
        int(hand.weights_gib[row.weights] * GIB),
        int(hand.overhead_gib * GIB),
    )
    steps = explain(calculation, row, card)
    return HandRow(
        budget_bytes=steps[0].budget_bytes,
        sequences=steps[0].sequences,
        steps=[
            {
                "term": step.term,
                "by_hand": step.by_hand,
                "real": step.real,
                "budget_gib": round(step.budget_bytes / GIB, 2),
                "sequences": step.sequences,
            }
            for step in steps
        ],
    )
