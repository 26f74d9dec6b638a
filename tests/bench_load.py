"""The load's part of `make bench`: what the search saves, what our driver costs next to `vllm bench serve` alone, how
exact its figures are."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from pipeline.load.driver import Cell, Request, Target, make_driver
from pipeline.load.metrics import window
from pipeline.load.records import RequestRecord
from pipeline.load.vllm_bench import REPOSITORY, _environment, _request_lines, bench_arguments
from tests.support.environments import environment_python
from tests.support.mock_vllm import start_mock
from tests.support.scripted_times import SCRIPTS, run_script
from tests.support.slo_trials import KNEE, grid_requests, run_search

SEEDS = 100
ROUNDS = 5
STREAMS, REQUESTS, TOKENS = 64, 512, 32
TTFT_S, ITL_S = 0.05, 0.02


class _Silent:
    def request(self, record: RequestRecord) -> None:
        pass

    def tick(self) -> bool:
        return False


def search_saving() -> None:
    """Requests of a search against those of a full grid of the same resolution, judged by the same bound."""
    found = [run_search(seed) for seed in range(SEEDS)]
    landed = sum((answer.low, answer.high) == (KNEE, KNEE) for answer, _ in found)
    spent = statistics.mean(requests for _, requests in found)
    grid = statistics.mean(grid_requests(seed) for seed in range(5))
    print(
        f"search under the SLO, simulated, true limit {KNEE} of 64 streams: lands on it with {landed} of {SEEDS} seeds, "
        f"{spent:.0f} requests against {grid:.0f} of a full grid, ratio {spent / grid:.2f}"
    )


def driver_overhead() -> None:
    """Output throughput of our driver over that of `vllm bench serve` alone, in turn against one mock."""
    prompts = tuple(Request((number, *range(1, 100)), TOKENS) for number in range(1000, 1000 + REQUESTS))
    python = environment_python("serve")
    ratios = []
    with (
        tempfile.TemporaryDirectory() as name,
        start_mock(ttft_s=TTFT_S, itl_s=ITL_S, kv_cache_tokens=10**7) as mock,
        make_driver("vllm-bench", python).session(Path(name)) as session,
    ):
        folder, target = Path(name), Target(mock.base_url, mock.served_name)
        cell = Cell("bench", prompts, concurrency=STREAMS)
        requests = folder / "requests.jsonl"
        requests.write_text(_request_lines(cell))
        raw = folder / "plain.json"
        argv = [*bench_arguments(cell, target, requests), "--save-result", "--save-detailed"]
        argv += ["--result-dir", name, "--result-filename", raw.name]
        with open(folder / "plain.log", "wb") as log:
            plain = subprocess.Popen(
                [str(python), "-m", "tests.support.plain_bench"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=_environment(),
                text=True,
            )
        assert plain.stdin is not None and plain.stdout is not None
        try:
            assert plain.stdout.readline() == "ready\n"
            session.run(target, cell, _Silent())  # both have imported by now
            for _ in range(ROUNDS):
                begin_s, end_s = window(session.run(target, cell, _Silent()).records)
                plain.stdin.write(json.dumps(argv) + "\n")
                plain.stdin.flush()
                assert plain.stdout.readline() == "done\n"
                found = json.loads(raw.read_text())
                starts, lasts = found["start_times"], found["latencies"]
                plain_s = max(s + t for s, t in zip(starts, lasts, strict=True)) - min(starts)
                ratios.append(plain_s / (end_s - begin_s))
        finally:
            plain.stdin.close()
            plain.wait()
            plain.stdout.close()
    print(
        f"driver against `vllm bench serve` alone, {STREAMS} streams on a mock, output throughput ratio: "
        f"{statistics.median(ratios):.3f} (median of {ROUNDS}, {min(ratios):.3f} to {max(ratios):.3f})"
    )


def accuracy() -> None:
    """The worst percentile against the scripted truth, at 1, 64 and 512 streams: 1.00 is 1 ms + 1 % off."""
    python = environment_python("serve")
    with (
        tempfile.TemporaryDirectory() as name,
        make_driver("vllm-bench", python).session(Path(name)) as session,
    ):
        vocabulary = {chr(0x4E00 + number): number for number in range(2000)}
        (Path(name) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        for script in SCRIPTS:
            errors = run_script(session, Path(name), script).percentile_errors()
            what, measured, scripted, worst = max(errors, key=lambda error: error[3])
            print(
                f"{script.streams:>4} streams: worst of {len(errors)} percentiles is {what}, {measured * 1e3:.1f} ms where "
                f"{scripted * 1e3:.1f} are scripted: {worst:.2f} of 1 ms + 1 %"
            )
