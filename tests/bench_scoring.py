"""The eval's rate on the real engine and the demo's model: several prompts in a request against one, by turns on one engine, and what
bounds it.

Choices go through lm-eval as the stage `quality` sends them, the token stream through our own client. Seconds of CPU say who works: the
engine core, the API server (JSON, tokens, HTTP) or the client. Both ways must give the same scores; the largest difference is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.environments import interpreter
from pipeline.quality.batching import batching_of
from pipeline.quality.evalset import sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, _scoring_model
from pipeline.quality.stream import StreamClient, make_stream, score_stream
from pipeline.quality.tasks import TaskFiles, read_task
from pipeline.serving.command import ServeSpec
from pipeline.serving.engine import locked_engine
from pipeline.serving.server import Server, serve
from pipeline.settings import Settings, load_settings
from tests.bench_quantize import demo_model

ROUNDS = 5
ITEMS = 80
STREAM_PROMPTS = 56
POOL_BYTES = 95 * 2**20
"""The demo's for BF16: 8 sequences of 512 tokens."""


Once = Callable[[int], list[float]]
"""Scores everything, so many prompts in a request."""


@dataclass(frozen=True)
class _Pass:
    """One time through: seconds on the clock, CPU seconds by process (`_cpu_s`), a score of each prompt."""

    wall_s: float
    cpu_s: list[float]
    scores: list[float]

    @property
    def rate(self) -> float:
        return len(self.scores) / self.wall_s


def main() -> None:
    settings = load_settings(["profile=demo"])
    with tempfile.TemporaryDirectory(prefix="quantgate-bench-") as name:
        folder = Path(name)
        model = demo_model(settings, folder)
        with serve(_spec(settings, model), interpreter("serve"), folder / "serve.log", 900.0) as server:
            together = batching_of("served", settings.server.max_num_seqs).prompts_per_request
            print(
                f"{'scored, ' + str(ROUNDS) + ' rounds by turns':28} {'prompts':>8} {'a request':>9} {'prompts/s':>10} "
                f"{'(range)':>16} {'CPU ms a prompt: engine':>24} {'API':>6} {'client':>7} {'largest difference':>20}"
            )
            _compare(server, "choices, through lm-eval", together, _choices(settings, server, model))
            _compare(server, "token stream, 20 likeliest", together, _stream(settings, server))


def _spec(settings: Settings, model: Path) -> ServeSpec:
    served = settings.server
    return ServeSpec(
        engine_version=locked_engine()[1], model_dir=model, served_name="bf16", target="cpu",
        max_model_len=served.max_model_len, max_num_seqs=served.max_num_seqs, dtype=served.dtype,
        max_num_batched_tokens=served.max_num_batched_tokens, block_size=served.block_size,
        kv_cache_memory_bytes=POOL_BYTES,
    )  # fmt: skip


def _compare(server: Server, what: str, together: int, once: Once) -> None:
    sizes = (1, together)
    for size in sizes:
        once(size)  # both have connections, code and memory by now
    passes: dict[int, list[_Pass]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in sizes:
            passes[size].append(_timed(server, once, size))
    first = passes[1][0].scores
    rates = {}
    for size in sizes:
        found = [one.rate for one in passes[size]]
        rates[size] = statistics.median(found)
        cpu = [
            1000 * statistics.median(one.cpu_s[who] / len(first) for one in passes[size]) for who in range(3)
        ]
        worst = max(abs(a - b) for one in passes[size] for a, b in zip(one.scores, first, strict=True))
        print(
            f"{what:28} {len(first):>8} {size:>9} {rates[size]:>10.1f} {f'{min(found):.1f} to {max(found):.1f}':>16} "
            f"{cpu[0]:>24.1f} {cpu[1]:>6.1f} {cpu[2]:>7.1f} {'none, bit by bit' if worst == 0 else f'{worst:.2g}':>20}"
        )
    print(
        f"{what:28} prompts a second, {together} in a request over one: {rates[together] / rates[1]:.2f}",
        flush=True,
    )


def _timed(server: Server, once: Once, size: int) -> _Pass:
    before, started = _cpu_s(server), time.perf_counter()
    scores = once(size)
    wall_s = time.perf_counter() - started
    used = [after - then for after, then in zip(_cpu_s(server), before, strict=True)]
    return _Pass(wall_s, used, scores)


def _cpu_s(server: Server) -> list[float]:
    """CPU seconds so far: the engine core's (all below the API server), the API server's, ours."""
    api = psutil.Process(server.pid)
    groups = (api.children(recursive=True), [api], [psutil.Process()])
    return [sum(sum(process.cpu_times()[:2]) for process in group) for group in groups]


def _choices(settings: Settings, server: Server, model: Path) -> Once:
    from lm_eval.api.instance import Instance

    evalset, task = settings.evalset, _task(settings)
    items = sample_items(task.items, ITEMS, evalset.seed, evalset.slice_items)
    endpoint = Endpoint(server.base_url, server.served_name, model, settings.server.max_model_len)
    asked = [
        Instance("loglikelihood", {"id": item.id}, (item.prompt, choice), place)
        for item in items
        for place, choice in enumerate(item.choices)
    ]

    def once(size: int) -> list[float]:
        run = EvalRun(
            task.items_path.parent, evalset.task, ITEMS, evalset.seed, settings.server.max_num_seqs, size
        )
        return [value for value, _ in _scoring_model(run, endpoint, Hooks()).loglikelihood(asked)]

    return once


def _stream(settings: Settings, server: Server) -> Once:
    evalset = settings.evalset
    wanted = evalset.divergence
    assert wanted is not None

    def client(size: int) -> StreamClient:
        return StreamClient(
            server.base_url, server.served_name, settings.server.max_num_seqs, evalset.seed, server.check,
            prompts_per_request=size,
        )  # fmt: skip

    items = sample_items(_task(settings).items, STREAM_PROMPTS, evalset.seed)
    stream = make_stream(client(1), items, wanted.continuation_tokens)

    def once(size: int) -> list[float]:
        # A prompt's scores as one number: bit-equal sums of some thousand logprobs are bit-equal logprobs.
        found = score_stream(client(size), stream, wanted.top_k)
        return [sum(p.logprobs) + sum(map(sum, p.top_logprobs)) for p in found.prompts]

    return once


def _task(settings: Settings) -> TaskFiles:
    assert settings.evalset.folder is not None
    return read_task(Path(settings.evalset.folder), settings.evalset.task)
