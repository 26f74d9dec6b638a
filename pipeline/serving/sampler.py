"""Follows a server's metrics, and its cards, while something else loads it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from pipeline.files import write_text
from pipeline.serving.signals import MetricsSnapshot, parse_metrics

COLUMNS = (
    "running",
    "waiting",
    "kv_usage",
    "preemptions_total",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens_total",
    "generation_tokens_total",
)


class MetricsSampler:
    """Reads `/metrics` every `interval_s` in a thread, from entry to exit, with one reading at each end.

    `timeline` holds one dict per reading: `t_s` (time.monotonic() halfway through the request), COLUMNS, and `gpus`, what
    `read_gpus` answered (None where it had nothing new, and always on a CPU). A reading that fails is left out, never guessed:
    `failures` counts them. It never raises into the load: a dead server is `Server.check`'s business.
    """

    def __init__(
        self,
        base_url: str,
        interval_s: float = 1.0,
        read_gpus: Callable[[], list[dict[str, Any]] | None] = lambda: None,
    ) -> None:
        self.base_url = base_url
        self.interval_s = interval_s
        self.read_gpus = read_gpus
        self.timeline: list[dict[str, Any]] = []
        self.failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-sampler", daemon=True)

    def __enter__(self) -> MetricsSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=60.0)  # a reading that was begun, and the last

    @contextlib.contextmanager
    def often(self, interval_s: float) -> Iterator[None]:
        """Another interval meanwhile, from the next reading on."""
        before, self.interval_s = self.interval_s, interval_s
        try:
            yield
        finally:
            self.interval_s = before

    def write(self, path: str | Path) -> Path:
        """One JSON object a line, atomically."""
        return write_text(path, "".join(json.dumps(row) + "\n" for row in self.timeline))

    def _run(self) -> None:
        session = requests.Session()
        session.trust_env = False
        due = time.monotonic()
        while True:
            last = self._stop.is_set()
            self._read(session)
            if last:
                return
            # Due times on a fixed grid, so that slow readings don't stretch the interval; missed ones are skipped.
            due = max(due + self.interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _read(self, session: requests.Session) -> None:
        before = time.monotonic()
        try:
            answer = session.get(f"{self.base_url}/metrics", timeout=10.0)
            answer.raise_for_status()
            snapshot: MetricsSnapshot = parse_metrics(answer.text)
        except (requests.RequestException, ValueError):
            self.failures += 1
            return
        row: dict[str, Any] = {"t_s": (before + time.monotonic()) / 2}
        row |= {name: getattr(snapshot, name) for name in COLUMNS}
        self.timeline.append(row | {"gpus": self.read_gpus()})
