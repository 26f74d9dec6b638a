"""Stage `quality@VARIANT`: serve the variant, score the team's eval set through it, and the reference's token stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.digests import sha256_tree
from pipeline.errors import EngineFailedError
from pipeline.quality.cache import RequestCache
from pipeline.quality.evalset import sample_items
from pipeline.quality.runner import Endpoint, EvalRun, Hooks, Scores, run_quality
from pipeline.quality.sequential import Looks, plan_looks
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
from pipeline.results import EngineFacts, Provenance, Quality, Sample, load, save
from pipeline.serving.provenance import provenance
from pipeline.serving.server import Server, serve
from pipeline.serving.signals import parse_log
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
    started = time.monotonic()
    variant, machine = variant_of(settings, name), environment()
    refuse_leaks(settings)
    # One prompt per scheduler step: what an item scores then depends on nothing but the model, so that two runs of one
    # variant give the same answers and a delta is the variant's, not the batching's.
    spec = serve_spec(settings, variant, planned(name), max_num_seqs=1)
    logs = LOGS / "quality" / name
    checkpoint = sha256_tree(weights_folder(variant.weights), DIGESTS / f"{variant.weights}.json")
    with serve(
        spec, python_of(settings, "serve"), logs / "serve.log", settings.server.startup_timeout_s
    ) as server:
        print(f"{name}: ready in {server.startup_s:.0f} s", file=sys.stderr)
        said = parse_log(server.log_text())
        check_served(settings, variant, spec, said, server.log_path)
        source = provenance(server, said, machine)
        cache = RequestCache(CACHE, _identity(name, checkpoint, source))
        finished = False
        try:
            scores = _score(settings, name, server, logs, cache)
            stream = _stream(settings, name, server, cache)
            finished = True
        finally:
            cache.close(finished)
        signals = parse_log(server.log_text())
    source = provenance(server, signals, machine)
    _require_same_engine(name, EngineFacts.of(source, signals.kv_cache_tokens))
    record = _record(settings, name, scores, source, time.monotonic() - started)
    write_stream(FOLDER / f"{name}.logprobs.parquet", stream)
    save(FOLDER / f"{name}.json", record)
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.3f} on "
    print(f"{name}: {accuracy}{record.n} items, {len(stream.prompts)} prompts of the token stream")


def _score(
    settings: Settings, name: str, server: Server, logs: Path, cache: RequestCache
) -> dict[str, Scores]:
    """Every task's scores by its name, the first task first."""
    evalset = settings.evalset
    endpoint = Endpoint(
        server.base_url,
        server.served_name,
        weights_folder(settings.variants[name].weights),
        settings.server.max_model_len,
    )
    looks = _looks(settings)
    found = {}
    for task in (evalset, *evalset.further):
        first = task is evalset
        print(f"{name}: task {task.task}", file=sys.stderr)
        hooks = Hooks(server.check, _stops(settings, name, looks) if first else None, cache)
        asked = _asked(settings, task, looks.items if first and looks else ())
        found[task.task] = run_quality(asked, endpoint, logs / task.task, hooks)
    return found


def _asked(settings: Settings, task: TaskSettings, looks: tuple[int, ...]) -> EvalRun:
    evalset = settings.evalset
    folder = None if evalset.folder is None or task.from_hub else Path(evalset.folder)
    # The reference was calibrated on nothing, but its items are those of every variant.
    held_against = folder is None and settings.quantizers
    return EvalRun(
        folder=folder,
        calibration=load_texts(settings.calibration.file) if held_against else {},
        seed=evalset.seed,
        concurrency=evalset.concurrency,
        looks=looks,
        **{key: getattr(task, key) for key in TaskSettings.model_fields if key != "from_hub"},
    )


def _looks(settings: Settings) -> Looks | None:
    """When a sequential run looks; None for a fixed sample."""
    evalset = settings.evalset
    if evalset.looks == 1 or evalset.folder is None:
        return None
    loaded = read_task(Path(evalset.folder), evalset.task).items
    items = sample_items(loaded, evalset.items, evalset.seed, evalset.slice_items)
    return plan_looks(len(items), evalset.looks, settings.policy.confidence, evalset.spending)


def _stops(settings: Settings, name: str, looks: Looks | None) -> Any:
    """The rule that ends a variant's run. Reference and A/A control score everything: all others are held against them."""
    if looks is None or name in (settings.reference, settings.control):
        return None
    policy = settings.policy
    margin = policy.task_margins.get(settings.evalset.task, policy.quality_margin)
    reference = load(FOLDER / f"{settings.reference}.json", Quality).samples

    def decided(samples: Sequence[Sample]) -> bool:
        delta = compare(reference, samples, margin=margin, confidence=policy.confidence, looks=looks)
        assert delta.delta_ci is not None
        found = non_inferiority(delta.delta_ci, margin)
        print(
            f"{name}: {found} after {delta.n} items (look {delta.look} of {len(looks.items)})",
            file=sys.stderr,
        )
        return found != "INCONCLUSIVE"

    return decided


def _stream(settings: Settings, name: str, server: Server, cache: RequestCache) -> ScoredStream:
    """The reference makes the stream and scores it, every other variant scores the reference's. Empty if none is wanted."""
    evalset, wanted = settings.evalset, settings.evalset.divergence
    if wanted is None or evalset.folder is None:
        return ScoredStream(stream_sha256(()), 1, ())
    client = StreamClient(
        server.base_url, server.served_name, evalset.concurrency, evalset.seed, server.check, cache
    )
    if name == settings.reference:
        loaded = read_task(Path(evalset.folder), evalset.task).items
        items = sample_items(loaded, wanted.prompts, evalset.seed)
        tokens = make_stream(client, items, wanted.continuation_tokens)
    else:
        tokens = stream_of(read_stream(FOLDER / f"{settings.reference}.logprobs.parquet"))
    return score_stream(client, tokens, wanted.top_k)


def _record(
    settings: Settings, name: str, scores: dict[str, Scores], source: Provenance, wall_s: float
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
        looks=evalset.looks,
        spending=evalset.spending,
        truncated_prompts=found.format.truncated_prompts,
        format=found.format,
        further={task: one.scores for task, one in scores.items() if task != evalset.task},
        lm_eval_version=first.lm_eval_version,
        provenance=source,
        wall_s=wall_s,
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


def _require_same_engine(name: str, found: EngineFacts) -> None:
    """Quality and speed of one variant must come from the same kernels, or the verdict joins two different things."""
    measured = load(RESULTS / "measure" / f"{name}.engine.json", EngineFacts)
    for key, value in measured.model_dump().items():
        if getattr(found, key) != value:
            raise EngineFailedError(
                f"{name} was measured with {key} {value!r} and scored with {getattr(found, key)!r}; "
                f"run `dvc repro --force` for both of its stages"
            )


if __name__ == "__main__":
    sys.exit(stage_main(run, "variant"))
