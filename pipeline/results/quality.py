"""Stage `quality`: every answer and its scores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.results.machine import Provenance
from pipeline.results.record import Record
from pipeline.results.time import Phase


class Sample(Record):
    """One eval item's answer. The three hashes are the join key between variants."""

    id: str
    slice: str
    cluster: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    correct: bool
    chosen: int | None = Field(description="index of the choice that was taken; null for a generated answer")
    target: int | None = Field(description="index of the right choice; null for a generated answer")
    loglikelihoods: list[float] = Field(
        description="natural log, one per choice; empty for a generated answer"
    )
    prompt: str = Field(default="", description="as it was sent, chat template included")
    choices: list[str] = Field(default_factory=list)
    generated: str | None = Field(
        default=None, description="the generated answer; null where choices are scored"
    )
    expected: str | None = Field(default=None, description="the right answer as text")
    cut: bool = Field(default=False, description="the generated answer ended at the token limit")

    @property
    def answer(self) -> str | None:
        """The answer as text, None where it wasn't kept."""
        if self.chosen is None:
            return self.generated
        return self.choices[self.chosen] if self.chosen < len(self.choices) else None


class SliceScore(Record):
    """Accuracy of one slice with its Wilson interval."""

    n: int
    accuracy: float
    ci: tuple[float, float]
    chance: float


class RollingText(Record):
    """One text whose own likelihood was measured."""

    id: str
    slice: str
    cluster: str
    doc_hash: str
    loglikelihood: float = Field(description="natural log, of the whole text")
    utf8_bytes: int


class TaskFormat(Record):
    """How a task was put to the model, and what can go wrong with that without a word."""

    chat_template: bool
    fewshot: int | None = Field(description="examples before each prompt; null: as the task's yaml says")
    bos_tokens: int | None = Field(description="BOS tokens that a prompt begins with, counted")
    truncated_prompts: int = Field(
        description="prompts that were cut; more than none only where that is allowed"
    )
    empty_answers: int
    cut_answers: int = Field(description="generated answers that ended at the token limit")


class TaskScores(Record):
    """One task of an eval set."""

    task: str
    kind: str = Field(description="lm-eval's output_type, or benchmark for one of its own tasks")
    n: int
    accuracy: float | None = Field(description="null where texts are measured instead of answers")
    accuracy_ci: tuple[float, float] | None
    slices: dict[str, SliceScore]
    samples: list[Sample]
    texts: list[RollingText]
    format: TaskFormat


class Quality(Record):
    """`results/quality/<variant>.json`."""

    variant: str
    profile: str
    evalset: str
    task: str = Field(
        default="", description="lm-eval task of the figures below; further tasks are in `further`"
    )
    evalset_sha256: str
    sample_seed: int
    n: int
    accuracy: float | None
    accuracy_ci: tuple[float, float] | None
    slices: dict[str, SliceScore]
    samples: list[Sample]
    batching: Literal["served", "serial", "invariant"] | None = Field(
        default=None,
        description="sequences at once: as deployed, one, or as deployed on batch-invariant kernels",
    )
    looks: int = Field(default=1, ge=1, description="times that a sequential run looks; 1: a fixed sample")
    spending: Literal["pocock", "obrien-fleming"] = Field(
        default="pocock", description="how a sequential run spends its error over the looks"
    )
    truncated_prompts: int
    format: TaskFormat | None = None
    further: dict[str, TaskScores] = Field(
        default_factory=dict, description="the set's further tasks by name, each with a gate of its own"
    )
    lm_eval_version: str
    provenance: Provenance
    wall_s: float
    phases: list[Phase] = Field(default_factory=list, description="of wall_s; empty where nobody looked")
