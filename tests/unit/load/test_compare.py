"""Intervals over repeats, drift, and the parts of the FP8 effect, on numbers whose answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeline.load.compare import at_level, control_level, drifts, effects, estimate, ratio
from pipeline.results import LoadLevel, Measurement
from tests.support import sample_results


def test_fewer_than_three_repeats_have_no_interval() -> None:
    found = estimate([10.0, 12.0])
    assert (found.value, found.interval, found.drifts) == (11.0, None, None)
    alone = ratio([10.0], [12.0])
    assert alone is not None and (alone.value, alone.interval) == (1.2, None)
    assert ratio([], [1.0]) is None and ratio([0.0], [1.0]) is None


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """A percentile bootstrap of eight repeats is a little narrow: 85 to 97 of 100 for a nominal 95."""
    rng = random.Random(3)
    covered = ratios = 0
    for _ in range(200):
        base, other = [[rng.gauss(mean, 1.0) for _ in range(8)] for mean in (10.0, 20.0)]
        low, high = estimate(base).interval or (0.0, 0.0)
        covered += low <= 10.0 <= high
        found = ratio(base, other)
        assert found is not None and found.interval is not None
        ratios += found.interval[0] <= 2.0 <= found.interval[1]
    assert 170 <= covered <= 195
    assert 170 <= ratios <= 197


def test_the_same_repeats_give_the_same_interval() -> None:
    assert estimate([1.0, 2.0, 4.0]) == estimate([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("values", "alarm"),
    [
        ([100.0, 96.0, 91.0], True),
        ([100.0, 103.0, 107.0], True),
        ([100.0, 99.0, 98.0], False),  # one way, but by 2 %
        ([100.0, 88.0, 93.0], False),  # by 7 %, but back and forth
    ],
)
def test_drift_is_a_steady_change_of_more_than_5_percent(values: list[float], alarm: bool) -> None:
    assert drifts(values) is alarm
    assert estimate(values).drifts is alarm


def level(concurrency: int, **changes: Any) -> LoadLevel:
    base = sample_results.measurement("bf16").levels[0]
    values = {"concurrency": concurrency, "completed": 10, "input_tokens": 2240, "output_tokens": 320}
    return base.model_copy(update=values | changes)


def measured(name: str, *levels: LoadLevel) -> Measurement:
    return sample_results.measurement(name).model_copy(update={"levels": list(levels)})


def test_control_is_the_highest_level_that_fits_at_its_own_length() -> None:
    """256 tokens a request are two blocks; 54 blocks less the null block hold 26 of them."""
    assert control_level(measured("bf16", level(1), level(8), level(26), level(27))) == 26
    assert control_level(measured("bf16", level(27))) is None


def test_fp8_effect_is_split_into_its_parts() -> None:
    def point(value: float) -> Any:
        return sample_results._distribution(50, value, 0.1)

    base = measured(
        "bf16",
        level(1, ttft=point(100), tpot=point(20), peak_running=1),
        level(8, ttft=point(300), tpot=point(40), peak_running=8),
        level(
            60,
            ttft=point(9000),
            tpot=point(50),
            goodput_rps=1.0,
            output_throughput_tok_s=50.0,
            steady=None,
            peak_running=26,
        ),
    )
    other = measured(
        "bf16-fp8kv",
        level(1, ttft=point(110), tpot=point(21), peak_running=1),
        level(8, ttft=point(300), tpot=point(60), peak_running=8),
        level(
            60,
            ttft=point(4000),
            tpot=point(70),
            goodput_rps=1.8,
            output_throughput_tok_s=60.0,
            steady=None,
            peak_running=53,
        ),
    )
    found = {effect.part: effect for effect in effects(base, other)}
    values = {part: effect.ratio.value for part, effect in found.items() if effect.ratio}
    assert values == pytest.approx(
        {
            "KV tokens": 2.0,
            "prefill": 1.1,
            "decode": 1.5,
            "saturated goodput": 1.8,
            "saturated throughput": 1.2,
            "control": 1.0,
        }
    )
    assert "at 1 streams" in found["prefill"].what
    assert "at 8 streams" in found["decode"].what and "at 8 streams" in found["control"].what
    assert "at 60 streams" in found["saturated goodput"].what


def test_a_figure_that_a_repeat_lacks_is_left_out() -> None:
    both = measured(
        "bf16", level(4, goodput_rps=1.0), level(4, goodput_rps=None, repeat=2), level(8, goodput_rps=3.0)
    )
    assert at_level(both, 4, lambda item: item.goodput_rps) == [1.0]
