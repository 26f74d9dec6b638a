"""What a verdict is judged by: plain frozen values, so that the gates need neither a profile nor a file.

Every limit is the user's; the few constants in the gates say beside them why they aren't.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slo(_Strict):
    """Latency limits that a share of the requests must meet."""

    ttft_ms: float = Field(gt=0, description="time to first token")
    tpot_ms: float = Field(gt=0, description="time per output token after the first")
    percentile: float = Field(gt=0, lt=1, description="share of requests within the limit: 0.99 is p99")
    confidence: float = Field(
        gt=0.5, lt=1, description="of the binomial bound on that share; MLPerf uses 0.99"
    )


class Policy(_Strict):
    """What the team needs and how sure it wants to be."""

    required_sequences: int = Field(
        ge=1, description="sequences of max_model_len tokens that must fit at once"
    )
    quality_margin: float = Field(gt=0, lt=1, description="accuracy that may be lost; 0.02 = 2 points")
    task_margins: dict[str, float] = Field(default_factory=dict, description="of tasks with one of their own")
    max_kl: float | None = Field(
        default=None, gt=0, description="mean truncated KL divergence; null: no gate"
    )
    min_same_top1: float | None = Field(
        default=None, gt=0, lt=1, description="same likeliest token; null: no gate"
    )
    max_perplexity_ratio: float | None = Field(
        default=None, gt=1, description="variant / reference; null: no gate"
    )
    max_delta_p_rms: float | None = Field(
        default=None, gt=0, lt=1, description="change of a token's probability; null: no gate"
    )
    confidence: float = Field(
        gt=0.5,
        lt=1,
        description="two-sided, of the accuracy difference; 0.95 makes a false GO at the margin a 2.5 % event",
    )
    slo: Slo | None = Field(default=None, description="null: no latency limits, hence no latency gates")
    minimum_completed: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the load's requests that must complete; 1.0: no request may fail",
    )
    allow_emulated_speed_gate: bool = Field(
        default=False,
        description="true: latency gates decide even where a kernel or the device is emulated; for trials of the tool",
    )

    def margin_of(self, task: str) -> float:
        """The accuracy that may be lost on one task."""
        return self.task_margins.get(task, self.quality_margin)


class VariantIntent(_Strict):
    """What a variant says it is, to hold against what the engine really ran."""

    weights: str = Field(min_length=1, description="bf16, or the quantization scheme's name")
    kv_cache_dtype: str = Field(min_length=1, description="bfloat16, fp8 or one of the per-token-head dtypes")
    kv_scales: Literal["checkpoint", "1.0"] | None = Field(
        default=None, description="FP8 scales the variant is about; null: whichever the checkpoint brings"
    )
    skipped_layers: int = Field(default=0, description="layers whose cache the variant leaves at 16 bits")
    attention_backend: str | None = Field(
        default=None, description="pinned by the variant's flags; null: any"
    )
    weights_kernel: str | None = Field(
        default=None,
        description="part of the linear kernel's name that must be taken, such as marlin; null: any",
    )
