"""The metrics sampler against the mock."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from pipeline.serving import sampler as module
from pipeline.serving.sampler import COLUMNS, MetricsSampler
from tests.support.mock_vllm import MockServer, start_mock
from tests.support.patience import wait_until


def load(mock: MockServer, requests_at_once: int, tokens: int = 100) -> list[threading.Thread]:
    body = {"model": mock.served_name, "prompt": " word" * 300, "max_tokens": tokens}
    threads = [
        threading.Thread(
            target=requests.post, args=(f"{mock.base_url}/v1/completions",), kwargs={"json": body}
        )
        for _ in range(requests_at_once)
    ]
    for thread in threads:
        thread.start()
    return threads


def test_sees_the_pool_fill_and_empty(tmp_path: Path) -> None:
    # 8 blocks of 128, one of them the null block; a request of 300 + 100 tokens holds 4: one runs, the others wait
    full_was_seen = threading.Event()
    script = {"kv_cache_tokens": 1024, "preemptions_per_request": 1}
    with start_mock(hold=lambda number, received: not full_was_seen.is_set(), **script) as mock:
        with MetricsSampler(mock.base_url, interval_s=0.05) as sampler:
            threads = load(mock, 3)
            wait_until(lambda: sampler.timeline and sampler.timeline[-1]["waiting"] == 2)
            full_was_seen.set()
            for thread in threads:
                thread.join()
        rows = sampler.timeline
    assert {row["running"] for row in rows} == {0, 1}
    assert max(row["waiting"] for row in rows) == 2
    assert max(row["kv_usage"] for row in rows) == pytest.approx(4 / 7)
    assert rows[-1]["generation_tokens_total"] == 300
    assert rows[-1]["prompt_tokens_total"] == 900
    assert rows[-1]["preemptions_total"] == 3
    assert all(set(row) == {"t_s", *COLUMNS, "gpus"} and row["gpus"] is None for row in rows)
    times = [row["t_s"] for row in rows]
    assert times == sorted(times)
    written = sampler.write(tmp_path / "timeline.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == rows


def test_readings_go_on_no_faster_than_asked_and_the_clock_is_monotonic() -> None:
    with start_mock() as mock:
        before = time.monotonic()
        with MetricsSampler(mock.base_url, interval_s=0.1) as sampler:
            wait_until(lambda: len(sampler.timeline) >= 10)
        after = time.monotonic()
    assert len(sampler.timeline) <= (after - before) / 0.1 + 2  # one at each end
    assert before <= sampler.timeline[0]["t_s"] <= sampler.timeline[-1]["t_s"] <= after


def test_slow_readings_do_not_stretch_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: readings of 0.3 s stay on the grid of 1 s, one of 2.5 s moves it, and the grid may be finer."""
    clock, begun, takes_s = [100.0], [], [0.3, 0.3, 2.5, 0.3, 0.3, 0.3]
    sampler = MetricsSampler("http://127.0.0.1:9", interval_s=1.0)

    def read(session: requests.Session) -> None:
        begun.append(clock[0])
        clock[0] += takes_s[len(begun) - 1]
        if len(begun) == len(takes_s) - 2:
            finer.enter_context(sampler.often(0.5))
        if len(begun) == len(takes_s) - 1:
            sampler._stop.set()

    def wait(seconds: float) -> None:
        clock[0] += max(0.0, seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(sampler, "_read", read)
    monkeypatch.setattr(sampler._stop, "wait", wait)
    with contextlib.ExitStack() as finer:
        sampler._run()
    assert begun == pytest.approx([100.0, 101.0, 102.0, 104.5, 105.0, 105.5])
    assert sampler.interval_s == 1.0


def test_survives_a_dying_server_and_keeps_what_it_has() -> None:
    with start_mock() as mock, MetricsSampler(mock.base_url, interval_s=0.05) as sampler:
        wait_until(lambda: len(sampler.timeline) >= 3)
        mock.die()
        wait_until(lambda: sampler.failures >= 3)
    assert len(sampler.timeline) >= 3
    assert all(row["running"] == 0 for row in sampler.timeline)


def test_no_server_gives_no_rows() -> None:
    with MetricsSampler("http://127.0.0.1:9", interval_s=0.05) as sampler:
        time.sleep(0.1)
    assert sampler.timeline == []
    assert sampler.failures >= 1
