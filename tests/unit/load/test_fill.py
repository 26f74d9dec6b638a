"""The fill test's plan and what it makes of the samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeline.load.fill import FillPlan, fill_result, plan_fill
from pipeline.results import Capacity, FillTest
from tests.support.load_records import failed, record

ROWS = (2, 6, 8, 8, 8)


def capacity(fitting: int | None = 8, tokens: int = 4480) -> Capacity:
    return Capacity(
        max_model_len=512,
        block_size=128,
        kappa_bytes=23_040,
        kv_budget_bytes=None,
        predicted_tokens=tokens,
        predicted_sequences=None,
        predicted_fitting_sequences=fitting,
        reported_tokens=None,
        reported_sequences=None,
        observed_peak_running=None,
    )


def test_sequences_are_of_full_length_and_take_their_blocks_on_admission() -> None:
    """12 x 512 tokens at 2,048 a step take 4 steps; so long and 12 more the first sequence must go on."""
    plan = plan_fill(capacity(), 4, max_num_seqs=64, max_num_batched_tokens=2048)
    assert (plan.offered, plan.predicted_running, plan.limited_by) == (12, 8, None)
    assert plan.prompt_tokens + plan.output_tokens == 512
    assert plan.output_tokens == 4 + 12
    assert plan.prompt_tokens > 3 * 128  # its fourth block, the last, is taken at once


def test_the_scheduler_may_be_the_limit() -> None:
    plan = plan_fill(capacity(43), 4, max_num_seqs=32, max_num_batched_tokens=None)
    assert (plan.offered, plan.predicted_running) == (36, 32)
    assert plan.limited_by == "max_num_seqs 32 is below the 43 sequences that fit"


def result(running: tuple[float, ...], **changes: Any) -> FillTest:
    plan = plan_fill(changes.pop("capacity", capacity()), 4, 64, 2048)
    tokens = changes.pop("reported_tokens", 4480)
    records = [record(index, 10.0, 1.0, 1.0, tokens=6, level=12, cell="fill") for index in range(12)]
    if changes.pop("one_failed", False):
        records[3] = failed(records[3])
    usage, preemptions = changes.pop("usage", 0.94), changes.pop("preemptions", 0.0)
    rows = [{"t_s": 9.0, "running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "preemptions_total": 1.0}]
    for second, count in enumerate(running):
        rows.append(
            {
                "t_s": 11.0 + second,
                "running": float(count),
                "waiting": 12.0 - count,
                "kv_usage": usage,
                "preemptions_total": 1.0 + preemptions,
            }
        )
    rows.append(
        {"t_s": 20.0, "running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "preemptions_total": 1.0 + preemptions}
    )
    assert not changes
    return fill_result(plan, capacity(), tokens, records, rows)


def test_agreement_to_the_sequence() -> None:
    found = result(ROWS)
    assert (found.observed_peak_running, found.waiting_at_peak, found.preemptions) == (8, 4, 0)
    assert (found.agrees, found.observed_peak_kv_usage) == (True, 0.94)
    assert found.note == "8 of 12 ran at once, 4 waited; 8 were predicted"
    assert result((2, 7, 7)).agrees  # one sequence off is still agreement
    assert (found.start_s, found.end_s) == (10.0, 16.0)


def test_the_queue_is_the_longest_while_the_peak_ran() -> None:
    """Ten of twelve had come at the first sample; at the last three had ended, and three of the queue had taken their places."""
    rows = [
        {"t_s": 11.0 + n, "running": 8.0, "waiting": w, "kv_usage": 0.9}
        for n, w in enumerate((2.0, 4.0, 1.0))
    ]
    rows.insert(0, {"t_s": 10.5, "running": 2.0, "waiting": 6.0, "kv_usage": 0.2})
    records = [record(0, 10.0, 1.0, 1.0, tokens=6, level=12, cell="fill")]
    assert fill_result(FillPlan(12, 488, 24, 8, None), capacity(), 4480, records, rows).waiting_at_peak == 4


@pytest.mark.parametrize(
    ("running", "changes", "named"),
    [
        ((2, 6, 6), {}, "no reason was found"),
        ((2, 6, 6), {"usage": 0.7}, "at most 70% full"),
        ((2, 6, 6), {"reported_tokens": 3456}, "has 3456 tokens, not the predicted 4480"),
        ((2, 6, 6), {"preemptions": 3.0}, "3 preemptions"),
        ((2, 6, 6), {"one_failed": True}, r"1 requests failed \(ClientPayloadError"),
        ((6,), {}, "only 1 samples were taken"),
        ((2, 11, 11), {"reported_tokens": 6144}, "takes 4 blocks on admission, so up to 11 may start"),
    ],
)
def test_disagreement_says_why(running: tuple[float, ...], changes: dict[str, Any], named: str) -> None:
    found = result(running, **changes)
    assert found.agrees is False
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(found.note)


def test_nothing_sampled_is_nothing_known() -> None:
    found = result(())
    assert (found.observed_peak_running, found.agrees) == (None, None)
    assert "couldn't be read" in found.note


def test_nothing_predicted_is_said() -> None:
    plan = dataclasses.replace(FillPlan(12, 488, 24, None, None))
    rows = [{"t_s": 11.0, "running": 8.0, "waiting": 4.0, "kv_usage": 0.9}]
    found = fill_result(plan, capacity(None), 4480, [record(0, 10.0, 1.0, 1.0, level=12, cell="fill")], rows)
    assert found.agrees is None and "no prediction" in found.note
