"""Stage `measure@VARIANT`: serve the variant, read what the engine says of itself, and load it past its pool's limit."""

from __future__ import annotations

import sys
import time

from pipeline.environments import interpreter
from pipeline.load.driver import make_driver
from pipeline.load.measure import run_load
from pipeline.load.records import write_records
from pipeline.load.workload import Workload
from pipeline.planning.reconciliation import reconciled
from pipeline.results import Capacity, EngineFacts, LoadLevel, Measurement, save
from pipeline.serving.provenance import provenance
from pipeline.serving.sampler import MetricsSampler
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics
from pipeline.settings import Settings
from pipeline.stages.context import (
    LOGS,
    RESULTS,
    environment,
    planned,
    serve_spec,
    stage_main,
    variant_of,
    weights_folder,
)


def run(settings: Settings, name: str) -> None:
    started = time.monotonic()
    variant = variant_of(settings, name)
    machine = environment()
    row = planned(name)
    python = interpreter("serve")
    logs = LOGS / "measure" / name
    load = settings.load
    workload = Workload(**load.model_dump(exclude={"driver"}))
    spec = serve_spec(settings, variant, row)
    with serve(spec, python, logs / "serve.log", settings.server.startup_timeout_s) as server:
        capacity, terms = reconciled(
            settings, row, parse_log(server.log_text()), parse_metrics(server.metrics_text())
        )
        print(
            f"{name}: ready in {server.startup_s:.0f} s, {capacity.reported_tokens:,} KV tokens",
            file=sys.stderr,
        )
        with MetricsSampler(server.base_url) as sampler:
            levels, records = run_load(
                workload,
                make_driver(load.driver, python),
                server,
                sampler,
                weights_folder(variant.weights),
                logs,
            )
        server.check()
        signals = parse_log(server.log_text())
    folder = RESULTS / "measure"
    requests_file = folder / f"{name}.requests.parquet"
    timeline_file = folder / f"{name}.timeline.jsonl"
    write_records(requests_file, records)
    sampler.write(timeline_file)
    source = provenance(server, signals, machine)
    save(folder / f"{name}.engine.json", EngineFacts.of(source, capacity.reported_tokens))
    save(
        folder / f"{name}.json",
        Measurement(
            variant=name,
            profile=settings.profile,
            weights=variant.weights,
            weight_bytes=row.weight_bytes,
            capacity=_observed(capacity, levels),
            reconciliation=terms,
            levels=levels,
            requests_file=str(requests_file),
            timeline_file=str(timeline_file),
            provenance=source,
            startup_s=server.startup_s,
            wall_s=time.monotonic() - started,
        ),
    )


def _observed(capacity: Capacity, levels: list[LoadLevel]) -> Capacity:
    """The capacity record completed with what the load showed."""
    peaks = [level.peak_running for level in levels if level.peak_running is not None]
    peak = max(peaks, default=None)
    offered = max(level.concurrency for level in levels)
    note = None
    if peak is None:
        note = "the server's metrics couldn't be read under load"
    elif peak >= offered:
        note = f"the load offered {offered} at once and all of them ran, so the pool's limit wasn't reached"
    return capacity.model_copy(update={"observed_peak_running": peak, "observed_peak_running_note": note})


if __name__ == "__main__":
    sys.exit(stage_main(run, "variant"))
