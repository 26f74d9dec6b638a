"""Stage `plan`: the budget term by term, and what fits."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipeline.results.record import Record


class Capacity(Record):
    """What fits in the KV pool. Predicted by arithmetic, reported by the engine, observed under load."""

    max_model_len: int = Field(description="tokens per sequence that the figures below are counted at")
    block_size: int = Field(description="tokens per KV block")
    kappa_bytes: int = Field(description="KV bytes per token")
    block_bytes: int | None = Field(
        default=None, description="bytes of one block over the layers of the fullest rank"
    )
    kv_budget_bytes: int | None = Field(description="bytes granted to the KV pool")
    blocks_per_sequence: int | None = Field(
        default=None,
        description="blocks that a sequence of max_model_len tokens takes, over all layer groups",
    )
    predicted_tokens: int | None = Field(description="what the engine's log should say")
    predicted_tokens_band: tuple[int, int] | None = Field(
        default=None, description="the same at the ends of the overheads' band"
    )
    predicted_fitting_band: tuple[int, int] | None = Field(
        default=None, description="predicted_fitting_sequences at the ends of the overheads' band"
    )
    predicted_sequences: float | None = Field(
        description="predicted_tokens / max_model_len, as the log counts"
    )
    predicted_fitting_sequences: int | None = Field(
        description="whole sequences that really fit: floor((blocks - 1) / blocks per sequence); one block is the "
        "engine's null block"
    )
    disagreement: str | None = Field(
        default=None,
        description="why the reported pool lies outside the planned band, where the band was never measured on this card; null: it "
        "doesn't",
    )
    reported_tokens: int | None = Field(description="from the engine's log, agreed with its metrics")
    reported_sequences: float | None = Field(description="from the engine's log")
    reported_fitting_sequences: int | None = Field(
        default=None, description="whole sequences that fit in the reported pool, the null block deducted"
    )
    observed_peak_running: int | None = Field(description="most requests seen running at once under load")
    observed_peak_running_note: str | None = Field(
        default=None, description="what the observation means, or why it's missing"
    )


class BudgetTerm(Record):
    """One term of the memory budget as planned, and as the engine reported it."""

    name: str
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    reported_bytes: int | None = Field(
        default=None, description="from the engine's log; null where it doesn't say"
    )
    within: bool | None = Field(default=None, description="whether the reported value lies in the band")
    driver: str = Field(default="", description="what the planned figure comes from")
    calibrated: bool = Field(
        default=True, description="exact, or measured on this card; false: published or computed figures"
    )
    note: str = ""


class HandRow(Record):
    """The capacity as the back-of-the-envelope formula gives it, and its way to the planned number, term by term."""

    budget_bytes: int
    sequences: int
    steps: list[dict[str, Any]] = Field(description="term, by_hand, real, budget_gib, sequences")


class PlanRow(Record):
    """One variant's line of the capacity plan."""

    variant: str
    weights: str
    kv_cache_dtype: str
    weight_bytes: int
    overhead_bytes: int
    terms: list[BudgetTerm] = Field(default_factory=list)
    by_hand: HandRow | None = None
    capacity: Capacity


class Plan(Record):
    """`results/plan.json`."""

    profile: str
    model: str
    device: str
    device_emulated: bool
    device_memory_bytes: int
    memory_utilization: float
    required_sequences: int
    rows: list[PlanRow]
