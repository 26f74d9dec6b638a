"""Stage `quality@VARIANT`: serve the variant, score the team's eval set through it, and the reference's token stream."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.compatibility.invariance import invariance_refusals
from pipeline.compatibility.weights import Engine
from pipeline.digests import sha256_tree
from pipeline.errors import EngineFailedError, EnvironmentUnfitError, UserInputError
from pipeline.gpu import lowest_capability
from pipeline.laps import Laps
from pipeline.quality.batching import INVARIANT, Batching, batching_of
from pipeline.quality.cache import RequestCache
from pipeline.quality.evalset import sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, Scores, load_ahead, run_quality
from pipeline.quality.sequential import plan_looks
from pipeline.quality.statistics import compare, non_inferiority
from pipeline.quality.stream import (
    ScoredStream,
    StreamClient,
    make_stream,
    read_stream,
    score_stream,
    stream_of,
    stream_sha256,
    write_stream,
)
from pipeline.quality.tasks import read_task, refuse_leaks
from pipeline.results import EngineFacts, Environment, Provenance, Quality, Sample, load, save
from pipeline.serving.command import ServeSpec
from pipeline.serving.provenance import provenance
from pipeline.serving.server import Server, serve
from pipeline.serving.signals import parse_log, parse_metrics
from pipeline.settings import Settings
from pipeline.settings.schema import TaskSettings
from pipeline.stages.context import (
    LOGS,
    RESULTS,
    check_served,
    environment,
    planned,
    python_of,
    serve_spec,
    stage_main,
    variant_of,
    weights_folder,
)
from pipeline.texts import load_texts

CACHE = Path("artifacts/requests")
DIGESTS = Path("artifacts/digests")
FOLDER = RESULTS / "quality"


def run(settings: Settings, name: str) -> None:
    laps = Laps()
    variant, machine = variant_of(settings, name), environment()
    refuse_leaks(settings)
    row, measured = planned(name), load(RESULTS / "measure" / f"{name}.engine.json", EngineFacts)
    spec = _scoring_spec(settings, serve_spec(settings, variant, row), measured)
    _refuse_invariance(settings, machine)
    logs = LOGS / "quality" / name
    checkpoint = sha256_tree(weights_folder(variant.weights), DIGESTS / f"{variant.weights}.json")
    laps.end("preparation")
    ahead = load_ahead()
    with serve(
        spec, python_of(settings, "serve"), logs / "serve.log", settings.server.startup_timeout_s
    ) as server:
        ahead.join()
        laps.end("engine start")
        print(f"{name}: ready in {server.startup_s:.0f} s", file=sys.stderr)
        said = parse_log(server.log_text())
        check_served(settings, variant, spec, said, server.log_path)
        source = provenance(server, said, machine)
        cache = RequestCache(CACHE, _identity(name, checkpoint, source))
        finished = False
        try:
            scores = _score(settings, name, server, logs, cache, laps)
            stream = _stream(settings, name, server, cache)
            if stream.prompts:
                laps.end("divergence")
            finished = True
        finally:
            cache.close(finished)
        signals = parse_log(server.log_text())
    laps.end("shutdown")
    source = provenance(server, signals, machine)
    _require_same_engine(name, measured, EngineFacts.of(source, signals.kv_cache_tokens, None), spec)
    write_stream(FOLDER / f"{name}.logprobs.parquet", stream)
    laps.end("records")
    record = _record(settings, name, scores, source, laps)
    save(FOLDER / f"{name}.json", record)
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.3f} on "
    print(f"{name}: {accuracy}{record.n} items, {len(stream.prompts)} prompts of the token stream")


def _scoring_spec(settings: Settings, spec: ServeSpec, measured: EngineFacts) -> ServeSpec:
    """The server that was measured, for scoring: its own pool, as many sequences at once as the eval set says.

    A card's engine would size its pool by profiling, which differs from start to start and with the number of sequences: it is
    given the measured pool in bytes instead (vLLM 0.32 v1/worker/gpu_worker.py, determine_available_memory).
    """
    batching = _batching(settings)
    return dataclasses.replace(
        spec,
        max_num_seqs=batching.max_num_seqs,
        kv_cache_memory_bytes=spec.kv_cache_memory_bytes or measured.kv_cache_bytes,
        environment={**spec.environment, **batching.variables},
    )


def _refuse_invariance(settings: Settings, machine: Environment) -> None:
    """`EnvironmentUnfitError` where the batch-invariant mode is asked of a card that hasn't got it."""
    if settings.evalset.batching != "invariant":
        return
    engine = Engine(settings.server.engine_version, settings.device.kind, lowest_capability(machine.gpus))
    for refusal in invariance_refusals(engine):
        raise EnvironmentUnfitError(f"{refusal.what}; {refusal.fix} [{refusal.source}]")


def _score(
    settings: Settings, name: str, server: Server, logs: Path, cache: RequestCache, laps: Laps
) -> dict[str, Scores]:
    """Every task's scores by its name, the first task first."""
    evalset = settings.evalset
    endpoint = Endpoint(
        server.base_url,
        server.served_name,
        weights_folder(settings.variants[name].weights),
        settings.server.max_model_len,
    )
    found = {}
    for task in (evalset, *evalset.further):
        print(f"{name}: task {task.task}", file=sys.stderr)
        hooks = Hooks(server.check, lambda: _counters(server), _stops(settings, name, task.task), cache)
        found[task.task] = run_quality(_asked(settings, task), endpoint, logs / task.task, hooks)
        laps.end(task.task)
    return found


def _counters(server: Server) -> object:
    """What moves while the engine works."""
    metrics = parse_metrics(server.metrics_text())
    return metrics.prompt_tokens_total, metrics.generation_tokens_total


def _asked(settings: Settings, task: TaskSettings) -> EvalRun:
    evalset, batching = settings.evalset, _batching(settings)
    folder = None if evalset.folder is None or task.from_hub else Path(evalset.folder)
    # The reference was calibrated on nothing, but its items are those of every variant.
    held_against = folder is None and settings.quantizers
    return EvalRun(
        folder=folder,
        calibration=load_texts(settings.calibration.file) if held_against else {},
        seed=evalset.seed,
        concurrency=batching.in_flight,
        prompts_per_request=batching.prompts_per_request,
        looks=evalset.looks,
        **{key: getattr(task, key) for key in TaskSettings.model_fields if key != "from_hub"},
    )


def _batching(settings: Settings) -> Batching:
    return batching_of(settings.evalset.batching, settings.server.max_num_seqs)


def _stops(settings: Settings, name: str, task: str) -> Any:
    """The rule that ends a variant's run on a task. Reference and A/A control score everything: all others are held against
    them."""
    evalset, policy = settings.evalset, settings.policy
    if evalset.looks == 1 or name in (settings.reference, settings.control):
        return None
    margin = policy.task_margins.get(task, policy.quality_margin)
    kept = load(FOLDER / f"{settings.reference}.json", Quality)
    if task != evalset.task and task not in kept.further:
        raise UserInputError(
            f"the reference wasn't scored on the task {task}; run the stage quality@{settings.reference} again"
        )
    reference = kept.samples if task == evalset.task else kept.further[task].samples

    def decided(samples: Sequence[Sample]) -> bool:
        looks = plan_looks(len(reference), evalset.looks, policy.confidence, evalset.spending)
        delta = compare(reference, samples, margin=margin, confidence=policy.confidence, looks=looks)
        assert delta.delta_ci is not None
        found = non_inferiority(delta.delta_ci, margin)
        print(
            f"{name}: {task}: {found} after {delta.n} items (look {delta.look} of {len(looks.items)})",
            file=sys.stderr,
        )
        return found != "INCONCLUSIVE"

    return decided


def _stream(settings: Settings, name: str, server: Server, cache: RequestCache) -> ScoredStream:
    """The reference makes the stream and scores it, every other variant scores the reference's. Empty if none is wanted."""
    evalset, wanted = settings.evalset, settings.evalset.divergence
    if wanted is None or evalset.folder is None:
        return ScoredStream(stream_sha256(()), 1, ())
    batching = _batching(settings)
    client = StreamClient(
        server.base_url,
        server.served_name,
        batching.in_flight,
        evalset.seed,
        server.check,
        cache,
        lambda: _counters(server),
        batching.prompts_per_request,
    )
    if name == settings.reference:
        loaded = read_task(Path(evalset.folder), evalset.task).items
        items = sample_items(loaded, wanted.prompts, evalset.seed)
        tokens = make_stream(client, items, wanted.continuation_tokens)
    else:
        tokens = stream_of(read_stream(FOLDER / f"{settings.reference}.logprobs.parquet"))
    return score_stream(client, tokens, wanted.top_k)


def _record(
    settings: Settings, name: str, scores: dict[str, Scores], source: Provenance, laps: Laps
) -> Quality:
    evalset = settings.evalset
    first = scores[evalset.task]
    found = first.scores
    return Quality(
        variant=name,
        profile=settings.profile,
        evalset=evalset.name,
        task=evalset.task,
        evalset_sha256=first.evalset_sha256,
        sample_seed=evalset.seed,
        n=found.n,
        accuracy=found.accuracy,
        accuracy_ci=found.accuracy_ci,
        slices=found.slices,
        samples=found.samples,
        batching=evalset.batching,
        looks=evalset.looks,
        spending=evalset.spending,
        truncated_prompts=found.format.truncated_prompts,
        format=found.format,
        further={task: one.scores for task, one in scores.items() if task != evalset.task},
        lm_eval_version=first.lm_eval_version,
        provenance=source,
        wall_s=laps.wall_s,
        phases=laps.phases(),
    )


def _identity(name: str, checkpoint: str, source: Provenance) -> dict[str, Any]:
    """Everything but the request that decides an answer. The variant's name is in it: the A/A control may not be answered
    from the reference's run, or the noise floor would be no measurement."""
    command = list(source.command[1:])
    for flag in ("--port", "--model"):  # a free port, and a path whose content is the checkpoint's hash
        place = command.index(flag)
        del command[place : place + 2]
    return {
        "variant": name,
        "checkpoint": checkpoint,
        "engine": source.engine,
        "engine_version": source.engine_version,
        "options": command,
        "variables": source.variables,
        "emulated": source.emulated,
        "cpu_flags": source.cpu_flags,
        "gpu": source.gpu,
    }


def _require_same_engine(name: str, measured: EngineFacts, found: EngineFacts, spec: ServeSpec) -> None:
    """Quality and speed of one variant must come from the same kernels and pool, or the verdict joins two different things.

    What isn't asked: the pool where each start profiled its own, and the kernels in the batch-invariant mode, which has others by
    design; the report says so.
    """
    profiled = {"kv_tokens"} if spec.kv_cache_memory_bytes is None else set()
    others = {"attention_backend", "weights_kernel"} if INVARIANT in spec.environment else set()
    for key, value in measured.model_dump(exclude={"kv_cache_bytes", *profiled, *others}).items():
        if getattr(found, key) != value:
            raise EngineFailedError(
                f"{name} was measured with {key} {value!r} and scored with {getattr(found, key)!r}; "
                f"run `dvc repro --force` for both of its stages"
            )


if __name__ == "__main__":
    sys.exit(stage_main(run, "variant"))
