"""Readings under load: never older than they say, null where there are none, heat told apart from the power limit."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from pipeline.gpu import GpuSampler, read_gpus, summarise
from pipeline.gpu import load as load_module
from tests.support.recorded_nvml import SECOND_UUID, UUID, RecordedNvml, mig_card, rtx_4090

HEAT = pynvml.nvmlClocksEventReasonSwThermalSlowdown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(load_module.time, "monotonic", lambda: now[0])
    return now


def test_a_reading_a_second_and_none_in_between(clock: list[float]) -> None:
    library = RecordedNvml(rtx_4090())
    with GpuSampler(read_gpus(library), library=library) as sampler:
        seen = []
        for _ in range(10):  # five seconds, asked twice a second
            seen.append(sampler() is not None)
            clock[0] += 0.5
        assert seen == [True, False] * 5
        clock[0] += 7.3  # a long pause is followed by one reading, not by a burst of missed ones
        assert sampler() is not None
        assert sampler() is None
    assert library.open_sessions == 0
    assert sampler() is None
    assert sampler.power_limits_w == {UUID: 450.0}


def test_nothing_is_read_on_a_cpu() -> None:
    with GpuSampler([]) as sampler:
        assert sampler() is None
    assert summarise([], [{"running": 3, "gpus": None}]) is None


def rows(library: RecordedNvml, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    with GpuSampler(read_gpus(library), interval_s=0.0, library=library) as sampler:
        for state in states:
            running = state.pop("running", 4)
            library.cards[0].update(state)
            found.append({"running": running, "gpus": sampler()})
    return found


def test_the_summary_counts_loaded_seconds_only() -> None:
    library = RecordedNvml(rtx_4090())
    timeline = rows(
        library,
        [
            {"sm_clock": 210, "power_mw": 30_000, "temperature": 40, "reasons": 1, "running": 0},
            {"sm_clock": 2_700, "power_mw": 400_000, "temperature": 70, "reasons": 0, "utilization": 90},
            {"sm_clock": 2_500, "power_mw": 440_000, "temperature": 75, "reasons": 4, "utilization": 100},
        ],
    )
    timeline.insert(1, {"running": 9, "gpus": None})
    [found] = summarise(read_gpus(library), timeline, {UUID: 450.0}) or []
    assert found.readings == 2
    assert found.sm_clock_mhz == (2_500, 2_600.0, 2_700)
    assert (found.temperature_max_c, found.power_mean_w, found.power_max_w) == (75, 420.0, 440.0)
    assert (found.power_limit_w, found.utilization_mean, found.power_capped) == (450.0, 0.95, 0.5)
    assert found.slowed == {}


def test_heat_slows_and_the_power_limit_does_not() -> None:
    library = RecordedNvml(rtx_4090())
    timeline = rows(library, [{"reasons": 4}, {"reasons": 4 | HEAT}, {"reasons": HEAT}, {"reasons": 0}])
    [found] = summarise(read_gpus(library), timeline) or []
    assert found.slowed == {"heat": 0.5}
    assert found.power_capped == 0.5


def test_what_a_slice_does_not_give_is_null() -> None:
    library = RecordedNvml(mig_card())
    gpus = read_gpus(library)
    with GpuSampler(gpus[:1], library=library) as sampler:
        [found] = summarise(gpus[:1], [{"running": 1, "gpus": sampler()}], sampler.power_limits_w) or []
    assert found.utilization_mean is None
    assert found.power_mean_w == 371.0


def test_two_cards_are_kept_apart_and_no_reading_is_null_not_zero() -> None:
    library = RecordedNvml(rtx_4090(), rtx_4090(SECOND_UUID, temperature=83))
    gpus = read_gpus(library)
    with GpuSampler(gpus, library=library) as sampler:
        timeline = [{"running": 1, "gpus": sampler()}]
    first, second = summarise(gpus, timeline) or []
    assert (first.temperature_max_c, second.temperature_max_c) == (61, 83)
    [empty, _] = summarise(gpus, [{"running": 0, "gpus": timeline[0]["gpus"]}]) or []
    assert empty.readings == 0
    assert (empty.sm_clock_mhz, empty.power_mean_w, empty.slowed, empty.power_capped) == (
        None,
        None,
        None,
        None,
    )
