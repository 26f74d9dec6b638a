"""Stage `measure@VARIANT`: serve the variant, read what the engine says of itself, fill its pool, load it, search its limit."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EngineFailedError, QuantgateError
from pipeline.files import write_json
from pipeline.gpu import GpuSampler, summarise
from pipeline.laps import Laps
from pipeline.load.driver import make_driver
from pipeline.load.fill import plan_fill
from pipeline.load.judge import boundary
from pipeline.load.measure import LoadOutcome, LoadPlan, run_load
from pipeline.load.records import write_records
from pipeline.load.slo import search_plans, slo_of
from pipeline.load.workload import make_source
from pipeline.planning.reconciliation import reconciled
from pipeline.results import Capacity, EngineFacts, Measurement, save
from pipeline.serving.provenance import provenance
from pipeline.serving.sampler import MetricsSampler
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log, parse_metrics
from pipeline.settings import Settings
from pipeline.settings.schema import FixedWorkload
from pipeline.stages.context import (
    LOGS,
    RESULTS,
    check_served,
    environment,
    planned,
    pool_bytes,
    python_of,
    serve_spec,
    stage_main,
    variant_of,
    weights_folder,
)

SAMPLE_INTERVAL_S = 0.5  # the fill test holds the pool full for a few decode steps only


def run(settings: Settings, name: str) -> None:
    laps = Laps()
    variant = variant_of(settings, name)
    machine = environment()
    row = planned(name)
    python = python_of(settings, "serve")
    logs = LOGS / "measure" / name
    plan = load_plan(settings, weights_folder(variant.weights), row.capacity)
    # As a deployed server has it: the load's prompts are distinct, and a hit rate above 1 % is an error.
    spec = dataclasses.replace(serve_spec(settings, variant, row), prefix_caching=True)
    outcome = LoadOutcome(laps=laps)
    driver = make_driver(settings.load.driver, python)
    laps.end("preparation")
    # The load generator imports for 10 s on one core while the engine starts.
    with (
        driver.session(logs) as session,
        serve(spec, python, logs / "serve.log", settings.server.startup_timeout_s) as server,
    ):
        laps.end("engine start")
        said = parse_log(server.log_text())
        check_served(settings, variant, spec, said, server.log_path)
        metrics = parse_metrics(server.metrics_text())
        capacity, terms = reconciled(row, said, metrics)
        tokens = capacity.reported_tokens
        print(f"{name}: ready in {server.startup_s:.0f} s, {tokens:,} KV tokens", file=sys.stderr)
        if capacity.disagreement is not None:
            print(f"{name}: {capacity.disagreement}", file=sys.stderr)
        with (
            GpuSampler(server.gpus) as read_gpus,
            MetricsSampler(server.base_url, SAMPLE_INTERVAL_S, read_gpus) as sampler,
        ):
            try:
                run_load(plan(reported_tokens=tokens), session, server, sampler, outcome)
            except EngineFailedError as error:
                _keep_unfinished(logs, name, outcome, error)
                raise
        server.check()
        signals = parse_log(server.log_text())
    laps.end("shutdown")
    folder = RESULTS / "measure"
    requests_file = folder / f"{name}.requests.parquet"
    timeline_file = folder / f"{name}.timeline.jsonl"
    write_records(requests_file, outcome.records)
    sampler.write(timeline_file)
    load = summarise(server.gpus, sampler.timeline, read_gpus.power_limits_w)
    source = provenance(server, signals, machine, load)
    facts = EngineFacts.of(source, capacity.reported_tokens, pool_bytes(row, metrics.num_gpu_blocks))
    save(folder / f"{name}.engine.json", facts)
    laps.end("records")
    save(
        folder / f"{name}.json",
        Measurement(
            variant=name,
            profile=settings.profile,
            weights=variant.weights,
            weight_bytes=row.weight_bytes,
            capacity=_observed(capacity, outcome),
            reconciliation=terms,
            levels=outcome.levels,
            fill=outcome.fill,
            searches=outcome.searches,
            requests_file=str(requests_file),
            timeline_file=str(timeline_file),
            provenance=source,
            startup_s=server.startup_s,
            wall_s=laps.wall_s,
            phases=laps.phases(),
        ),
    )


def load_plan(settings: Settings, model_dir: Path, capacity: Capacity) -> Callable[..., LoadPlan]:
    """What is run on a variant, once the engine has said how large its pool is (in tokens).

    Reads the prompts at once: what is wrong with them is said before an engine starts.
    """
    load, server = settings.load, settings.server
    source = make_source(load.workload, model_dir, load.seed, server.max_model_len)
    for search_plan, _ in search_plans(
        settings
    ):  # too few requests a probe: said now, not after the fill test
        boundary(settings.slo.percentile, settings.slo.confidence, search_plan.max_requests)
    fill = fill_source = None
    if load.fill is not None:
        fill = plan_fill(
            capacity, load.fill.extra_sequences, server.max_num_seqs, server.max_num_batched_tokens
        )
        lengths = FixedWorkload(
            kind="fixed", input_tokens=fill.prompt_tokens, output_tokens=fill.output_tokens
        )
        fill_source = make_source(lengths, model_dir, load.seed, server.max_model_len)
    return functools.partial(
        LoadPlan,
        source=source,
        levels=load.levels,
        requests_per_stream=load.requests_per_stream,
        min_requests=load.min_requests,
        repeats=load.repeats,
        repeat_until=load.repeat_until,
        warmup_requests=load.warmup_requests,
        slo=slo_of(settings),
        fill=fill,
        fill_source=fill_source,
        searches=search_plans(settings),
        capacity=capacity,
        seed=load.seed,
    )


def _keep_unfinished(logs: Path, name: str, outcome: LoadOutcome, error: QuantgateError) -> None:
    """What was measured before the engine gave up: no result (the stage failed), but not lost either."""
    write_records(logs / "unfinished.requests.parquet", outcome.records)
    finished = {
        "variant": name,
        "cause": str(error),
        "levels": [level.model_dump(mode="json") for level in outcome.levels],
        "fill": outcome.fill.model_dump(mode="json") if outcome.fill else None,
        "searches": [search.model_dump(mode="json") for search in outcome.searches],
        "probes": [probe.model_dump(mode="json") for probe in outcome.probes],
    }
    path = write_json(logs / "unfinished.json", finished)
    print(
        f"{name}: {len(outcome.levels)} levels and {len(outcome.probes)} probes were finished, they are in {path}",
        file=sys.stderr,
    )


def _observed(capacity: Capacity, outcome: LoadOutcome) -> Capacity:
    """The capacity record completed with what the load showed."""
    if outcome.fill is not None:
        peak, note = outcome.fill.observed_peak_running, outcome.fill.note
    else:
        peaks = [level.peak_running for level in outcome.levels if level.peak_running is not None]
        peak = max(peaks, default=None)
        note = "no fill test was run; this is the load levels' peak, whose requests may be shorter"
    return capacity.model_copy(update={"observed_peak_running": peak, "observed_peak_running_note": note})


if __name__ == "__main__":
    sys.exit(stage_main(run, "variant"))
