"""Stage `quality@VARIANT`: serve the variant and score the team's eval set through it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipeline.environments import interpreter
from pipeline.errors import EngineFailedError
from pipeline.quality.evalset import check_no_leak, load_items, load_texts
from pipeline.quality.runner import Endpoint, EvalRun, run_quality
from pipeline.results import EngineFacts, load, save
from pipeline.serving.provenance import provenance
from pipeline.serving.server import serve
from pipeline.serving.signals import parse_log
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
    variant, evalset = variant_of(settings, name), settings.evalset
    machine = environment()
    _refuse_leaks(settings)
    # One prompt per scheduler step: what an item scores then depends on nothing but the model, so that two runs of one
    # variant give the same answers and a delta is the variant's, not the batching's.
    spec = serve_spec(settings, variant, planned(name), max_num_seqs=1)
    logs = LOGS / "quality" / name
    with serve(spec, interpreter("serve"), logs / "serve.log", settings.server.startup_timeout_s) as server:
        print(f"{name}: ready in {server.startup_s:.0f} s", file=sys.stderr)
        scores = run_quality(
            EvalRun(
                folder=Path(evalset.folder),
                task=evalset.task,
                items=evalset.items,
                seed=evalset.seed,
                concurrency=evalset.concurrency,
                confidence=settings.policy.confidence,
            ),
            Endpoint(server.base_url, name, weights_folder(variant.weights), settings.server.max_model_len),
            logs,
            server.check,
        )
        signals = parse_log(server.log_text())
    source = provenance(server, signals, machine)
    _require_same_engine(name, EngineFacts.of(source, signals.kv_cache_tokens))
    record = scores.as_quality(name, settings.profile, evalset.name, evalset.seed, source)
    record = record.model_copy(update={"wall_s": time.monotonic() - started})
    save(RESULTS / "quality" / f"{name}.json", record)
    print(f"{name}: accuracy {record.accuracy:.3f} on {record.n} items")


def _require_same_engine(name: str, found: EngineFacts) -> None:
    """Quality and speed of one variant must come from the same kernels, or the verdict joins two different things."""
    measured = load(RESULTS / "measure" / f"{name}.engine.json", EngineFacts)
    for key, value in measured.model_dump().items():
        if getattr(found, key) != value:
            raise EngineFailedError(
                f"{name} was measured with {key} {value!r} and scored with {getattr(found, key)!r}; "
                f"run `dvc repro --force` for both of its stages"
            )


def _refuse_leaks(settings: Settings) -> None:
    """An eval item that is also calibration text would be measured on what it was tuned on."""
    items = load_items(Path(settings.evalset.folder) / "items.jsonl")
    for file in sorted({recipe.calibration_file for recipe in settings.quantizers.values()}):
        check_no_leak(items, load_texts(Path(file)))


if __name__ == "__main__":
    sys.exit(stage_main(run, "variant"))
