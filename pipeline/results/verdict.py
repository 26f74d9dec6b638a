"""Stage `verdict`: gates, deltas and the decision."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipeline.results.machine import Provenance
from pipeline.results.plan import Capacity
from pipeline.results.record import Decision, Record


class Gate(Record):
    """One rule with its threshold and what was found."""

    name: str
    decision: Decision
    value: float | None
    limit: float | None
    unit: str
    why: str
    gating: bool = Field(
        default=True,
        description="false: shown with the decision it would make, but no part of the verdict; `why` says why not",
    )


class QualityDelta(Record):
    """Paired comparison of a variant with the reference, in accuracy (1.0 = 100 points)."""

    n: int | None
    accuracy: float | None
    accuracy_ci: tuple[float, float] | None
    reference_accuracy: float | None
    reference_chance: float | None = Field(default=None, description="accuracy of guessing")
    delta: float | None = Field(description="variant - reference")
    delta_ci: tuple[float, float] | None = Field(
        description="score interval that decides; in sequential mode the repeated interval of the look"
    )
    delta_se: float | None = Field(description="clustered where items share a source")
    bootstrap_ci: tuple[float, float] | None = Field(
        default=None, description="percentile bootstrap over clusters; shown, never decides"
    )
    design_effect: float | None = Field(default=None, description="items that are worth one independent item")
    confidence: float
    margin: float
    flips: int | None = Field(description="items whose correctness changed, both directions")
    flips_lost: int | None
    flips_gained: int | None
    changed_answers: int | None = Field(description="items whose chosen answer changed, right or wrong")
    mcnemar_p: float | None
    items_to_decide: int | None = Field(
        description="items that would decide it if the truth is delta = 0; null if decided"
    )
    smallest_margin: float | None = Field(
        default=None,
        description="margin at which these items would have decided with 80 % probability at delta = 0",
    )
    noise_floor_flips: int | None = Field(description="flips of the A/A control")
    noise_floor_changed_answers: int | None
    noise_p: float | None = Field(
        default=None,
        description="one-sided exact p that the variant flips no more items than the A/A control",
    )
    within_noise: bool | None = Field(
        default=None, description="true: the flip rate isn't above the A/A floor, so it is noise"
    )
    untold: str | None = Field(
        default=None,
        description="why these items can't tell a loss whatever the interval says; null: they can",
    )
    look: int | None = Field(default=None, description="sequential mode: the look that stopped it, from 1")
    planned_looks: list[int] | None = Field(default=None, description="sequential mode: items at each look")
    slices: dict[str, dict[str, Any]] = Field(
        description="slice -> n, delta, delta_ci, p (exact), p_holm (corrected for the number of slices)"
    )


class Estimate(Record):
    """A figure with its standard error and confidence interval, null where there is too little to tell."""

    value: float
    se: float | None
    ci: tuple[float, float] | None


class Divergence(Record):
    """Next-token distributions of a variant against the reference's on one fixed token stream. Natural log."""

    stream_sha256: str
    prompts: int
    tokens: int = Field(description="positions that were scored")
    top_k: int = Field(description="likeliest tokens known of each position")
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate = Field(description="variant / reference")
    kl: Estimate = Field(
        description="mean top-k-truncated KL divergence (nats): all but the tokens known of both sides is lumped, "
        "which makes it a lower bound"
    )
    kl_percentiles: dict[str, Estimate]
    kl_tail_mass: float = Field(description="mean probability of the reference that was lumped")
    same_top1: Estimate = Field(description="share of positions with the same likeliest token")
    delta_p_mean: Estimate = Field(description="probability of the stream's token, variant - reference")
    delta_p_rms: Estimate
    delta_p_percentiles: dict[str, Estimate]


class Throughput(Record):
    """The levels' figures that people compare first."""

    peak_output_tok_s: float | None
    at_concurrency: int | None
    ratio_to_reference: float | None
    emulated: bool
    levels: list[dict[str, Any]] = Field(description="concurrency, output_tok_s, ttft_p50_ms, tpot_p50_ms …")


class Rung(Record):
    """One thing to try after a variant that loses quality."""

    change: str
    why: str
    variant: str | None = Field(description="the profile's variant that does it; null: none does")
    decision: Decision | None = Field(description="that variant's")
    sequences: int | None = Field(description="that fit at max_model_len, by the planner")
    max_model_len: int
    enough: bool | None = Field(description="whether they are as many as the policy wants")
    command: str | None = Field(
        description="what tries it; null where a variant does it, or nothing here can"
    )


class VariantVerdict(Record):
    """One variant: the conjunction of its gates, and the evidence beside it."""

    decision: Decision
    gates: list[Gate]
    capacity: Capacity | None
    quality: QualityDelta | None
    divergence: Divergence | None = None
    further: dict[str, QualityDelta] = Field(
        default_factory=dict, description="the eval set's further tasks, each with a gate of its own"
    )
    perplexity_ratios: dict[str, Estimate] = Field(
        default_factory=dict, description="rolling tasks: byte perplexity, variant / reference"
    )
    throughput: Throughput | None
    provenance: Provenance | None
    rescue: list[Rung] = Field(
        default_factory=list, description="of a variant that is NO-GO on quality: what to try next, in order"
    )


class Verdict(Record):
    """`results/verdict.json`."""

    profile: str
    reference: str
    control: str | None = Field(description="the A/A control, the reference run twice")
    variants: dict[str, VariantVerdict]
