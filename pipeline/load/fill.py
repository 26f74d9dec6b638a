"""The fill test: drive the KV pool full with sequences of known length, and hold what ran against the planner's number.

Every sequence ends at max_model_len tokens, as the planner counts, and its prompt is so long that it takes (nearly) all of
its blocks on admission. It generates long enough for the last prompt to be computed while the first sequence still runs: the
scheduler computes at most max_num_batched_tokens prompt tokens a step, and each step gives every running sequence one
token. So the pool is as full as it gets before the first request ends, and there the test is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.load.metrics import TimelineRow, growth, peak, window
from pipeline.load.records import RequestRecord
from pipeline.results import Capacity, FillTest

FILL_CELL = "fill"
HOLD_STEPS = 12  # decode steps with the pool full, so that samples a second apart see it
DEFAULT_BATCHED_TOKENS = 2048  # vLLM's smallest default; a larger real one only shortens the filling


@dataclass(frozen=True)
class FillPlan:
    """So many equal requests at once."""

    offered: int
    prompt_tokens: int
    output_tokens: int
    predicted_running: int | None
    limited_by: str | None
    """What holds the prediction below what the pool takes; None: the pool is the limit."""


def plan_fill(
    capacity: Capacity, extra: int, max_num_seqs: int, max_num_batched_tokens: int | None
) -> FillPlan:
    """`extra` requests more than should run at once, each `capacity.max_model_len` tokens long in the end."""
    fitting = capacity.predicted_fitting_sequences
    predicted = None if fitting is None else min(fitting, max_num_seqs)
    offered = (predicted if predicted is not None else max_num_seqs) + extra
    length = capacity.max_model_len
    batched = max((max_num_batched_tokens or DEFAULT_BATCHED_TOKENS) - offered, 1)
    steps = math.ceil(offered * length / batched)
    output = min(max(steps + HOLD_STEPS, 2), max(2, length // 2))
    limit = None
    if fitting is not None and fitting > max_num_seqs:
        limit = f"max_num_seqs {max_num_seqs} is below the {fitting} sequences that fit"
    return FillPlan(offered, length - output, output, predicted, limit)


def fill_result(
    plan: FillPlan,
    capacity: Capacity,
    reported_tokens: int,
    records: Sequence[RequestRecord],
    timeline: Sequence[TimelineRow],
) -> FillTest:
    """What the fill test's records and the server samples of a period that covers them show."""
    start_s, end_s = window(records)
    inside = [row for row in timeline if start_s <= row["t_s"] <= end_s]
    running = peak(inside, "running")
    preemptions = growth(timeline, "preemptions_total", start_s, end_s)
    agrees = None
    if running is not None and plan.predicted_running is not None:
        agrees = abs(running - plan.predicted_running) <= 1
    return FillTest(
        cell=records[0].cell,
        prompt_tokens=plan.prompt_tokens,
        output_tokens=plan.output_tokens,
        offered=plan.offered,
        predicted_running=plan.predicted_running,
        observed_peak_running=None if running is None else int(running),
        waiting_at_peak=_waiting_at_peak(inside),
        observed_peak_kv_usage=peak(inside, "kv_usage"),
        preemptions=preemptions,
        agrees=agrees,
        note=_explain(plan, capacity, reported_tokens, records, inside, agrees, preemptions),
        start_s=start_s,
        end_s=end_s,
    )


def _waiting_at_peak(inside: Sequence[TimelineRow]) -> int | None:
    """The longest queue of the samples that show the peak: before all requests have come, and once some have ended, it is shorter."""
    running = peak(inside, "running")
    waiting = peak([row for row in inside if row.get("running") == running], "waiting")
    return None if waiting is None else int(waiting)


def _explain(
    plan: FillPlan,
    capacity: Capacity,
    reported_tokens: int,
    records: Sequence[RequestRecord],
    inside: Sequence[TimelineRow],
    agrees: bool | None,
    preemptions: int | None,
) -> str:
    """One sentence on what was seen; where it isn't what was predicted, everything that speaks to why."""
    running, waiting = peak(inside, "running"), _waiting_at_peak(inside)
    if running is None:
        return "the server's metrics couldn't be read while the pool was being filled"
    seen = f"{running:.0f} of {plan.offered} ran at once, {waiting or 0:.0f} waited"
    if plan.predicted_running is None:
        return f"{seen}; no prediction was made"
    if agrees:
        limit = f", where {plan.limited_by}" if plan.limited_by else ""
        return f"{seen}; {plan.predicted_running} were predicted{limit}"
    why = []
    if capacity.predicted_tokens != reported_tokens:
        why.append(
            f"the engine's pool has {reported_tokens} tokens, not the predicted {capacity.predicted_tokens}"
        )
    failed = [record for record in records if record.failed]
    if failed:
        why.append(f"{len(failed)} requests failed ({failed[0].error})")
    per_prompt = -(-plan.prompt_tokens // capacity.block_size)
    blocks = reported_tokens // capacity.block_size - 1
    if blocks // per_prompt > plan.predicted_running:
        why.append(
            f"a prompt takes {per_prompt} blocks on admission, so up to {blocks // per_prompt} may start before they grow"
        )
    if preemptions:
        why.append(f"{preemptions} preemptions")
    usage = peak(inside, "kv_usage")
    if usage is not None and usage < 0.9 and running < plan.predicted_running:
        why.append(f"the pool was at most {usage:.0%} full: another limit than memory, or too few samples")
    if len(inside) < 3:
        why.append(f"only {len(inside)} samples were taken")
    return f"{seen}; {plan.predicted_running} were predicted: {'; '.join(why) or 'no reason was found'}"
