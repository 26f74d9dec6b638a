"""Runs an eval set through a served variant with lm-eval and returns what each item was answered.

Everything that lm-eval would decide by default is said here (context length, delimiter checks, cache, chat template, number of
examples), because a default that differs between two runs looks like a quality difference. It must not start an engine:
the stage passes the endpoint and a `check` that raises with the cause when the engine behind it is dead.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.files import sha256_file
from pipeline.quality.cache import RequestCache
from pipeline.quality.evalset import Item, check_no_leak, sample_items, scoring_order
from pipeline.quality.intervals import wilson_interval
from pipeline.quality.sequential import look_items
from pipeline.quality.stall import STALL_TIMEOUT_S, StallGuard
from pipeline.quality.statistics import slice_scores
from pipeline.quality.tasks import (
    TaskFiles,
    benchmark_ids,
    benchmark_items,
    benchmark_samples,
    one_line,
    own_samples,
    own_texts,
    read_task,
    with_data,
    write_sampled,
)
from pipeline.results import RollingText, Sample, TaskFormat, TaskScores

# Of the intervals in a run's own file; the verdict's are at the policy's level.
CONFIDENCE = 0.95
ANSWER_TOKENS = 1024
"""Of a task that doesn't say how long an answer may be: lm-eval's own 256 cuts a chat model's worked solutions, of which GSM8K's take
200 to 400."""
DYING_WAIT_S = 3.0
NO_LIMIT_S = 30 * 24 * 3600
DATASET_CACHE = (
    "datasets"  # lives for one run: a cached copy of an edited items file is the last thing wanted
)
NOISY_LOGGERS = (
    "lm_eval",
    "transformers",
    "datasets",
    "huggingface_hub",
    "asyncio",
    "urllib3",
    "httpx",
    "py.warnings",
)


@dataclass(frozen=True)
class Endpoint:
    """A served model. `max_length` is the server's max_model_len in tokens, `tokenizer_dir` the model's own folder."""

    base_url: str
    served_name: str
    tokenizer_dir: Path
    max_length: int


@dataclass(frozen=True)
class EvalRun:
    """What to ask. `folder` None: `task` is one of lm-eval's own. `items` None asks all; `seed` picks the sample.

    `metric` says right or wrong about an item whose answer is generated, or of a benchmark; choices of a team's own set
    are judged by the highest loglikelihood. `fewshot` None: as the task says. `concurrency` is the number of prompts in flight, of
    which those that are scored go `prompts_per_request` in a request (`batching`). `looks`: how often a run may stop, evenly spaced
    over the items; 1: it doesn't.
    `calibration`: id -> text that no item of lm-eval's own task may be in; a team's set is held against it earlier.
    """

    folder: Path | None
    task: str
    items: int | None
    seed: int
    concurrency: int
    prompts_per_request: int = 1
    metric: str | None = None
    filter: str = "none"
    fewshot: int | None = None
    chat_template: bool = False
    allow_truncated: bool = False
    slice_items: Mapping[str, int] = field(default_factory=dict)
    looks: int = 1
    calibration: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hooks:
    """What the caller adds: is the engine alive, does it work, may the run stop early, where are answers kept until it is done."""

    check: Callable[[], None] = field(default=lambda: None)
    progress: Callable[[], object] = field(default=lambda: None)
    decided: Callable[[Sequence[Sample]], bool] | None = None
    cache: RequestCache | None = None
    stall_timeout_s: float = STALL_TIMEOUT_S


@dataclass(frozen=True)
class Scores:
    """What came back, before anything is compared."""

    evalset_sha256: str
    scores: TaskScores
    lm_eval_version: str
    wall_s: float

    @property
    def samples(self) -> list[Sample]:
        return self.scores.samples


def load_ahead() -> threading.Thread:
    """Import what scoring needs, beside something that is waited for: 0.8 s. Join the thread before anything is scored: a module of
    transformers that is half imported lacks attributes. A failure shows where it is needed."""

    def load() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("pipeline.quality.completions")
            importlib.import_module("transformers.models.auto.tokenization_auto")

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread


def run_quality(run: EvalRun, endpoint: Endpoint, work_dir: Path, hooks: Hooks | None = None) -> Scores:
    """Score a task through `endpoint`. lm-eval's own log goes to `work_dir/lm-eval.log`.

    Errors: `UserInputError` (eval set or task yaml wrong, prompts too long, a benchmark's item in the calibration text),
    `EngineFailedError` (no answer, or one that is no score: missing or non-finite logprobs; the hook `check` is asked for the
    cause first).
    """
    started = time.monotonic()
    hooks = hooks or Hooks()
    work_dir.mkdir(parents=True, exist_ok=True)
    log_path = work_dir / "lm-eval.log"
    with _quiet(log_path, offline=run.folder is not None):
        try:
            found = (
                _run_benchmark(run, endpoint, hooks)
                if run.folder is None
                else _run_own(run, run.folder, endpoint, work_dir, hooks)
            )
        except EngineFailedError as error:
            _raise_engine_failure(error, hooks.check, log_path)
        finally:
            shutil.rmtree(work_dir / DATASET_CACHE, ignore_errors=True)
    _refuse_constant(found.samples)
    return Scores(found.sha256, _summed(run, found), found.lm_eval_version, time.monotonic() - started)


@dataclass
class _Found:
    """A run so far."""

    sha256: str
    kind: str
    model: Any = None
    lm_eval_version: str = ""
    samples: list[Sample] = field(default_factory=list)
    texts: list[RollingText] = field(default_factory=list)


def _run_own(run: EvalRun, folder: Path, endpoint: Endpoint, work_dir: Path, hooks: Hooks) -> _Found:
    """A team's set, in one go or look by look."""
    files = read_task(folder, run.task)
    items = {item.id: item for item in sample_items(files.items, run.items, run.seed, run.slice_items)}
    found = _Found(evalset_sha256(files.items_path, files.yaml_path), files.kind)
    found.model = _scoring_model(run, endpoint, hooks)
    for part in _parts(run, list(items), found, hooks):
        _score_part(run, files, [items[one] for one in part], found, work_dir)
    return found


def _parts(run: EvalRun, ids: Sequence[str], found: _Found, hooks: Hooks) -> Iterator[Sequence[str]]:
    """The items' ids look by look, until the answers so far (in `found`) decide. Texts that are only measured don't."""
    ordered = scoring_order(ids, run.seed) if run.looks > 1 else ids
    for start, end in itertools.pairwise((0, *look_items(len(ids), run.looks))):
        yield ordered[start:end]
        if end < len(ids) and hooks.decided is not None and found.samples and hooks.decided(found.samples):
            return


def _score_part(run: EvalRun, files: TaskFiles, items: Sequence[Item], found: _Found, work_dir: Path) -> None:
    sampled = write_sampled(files.items_path, items, work_dir / "items.jsonl")
    config = with_data(files.config, sampled, work_dir / DATASET_CACHE)
    results = _evaluate(run, found.model, [config], str(files.yaml_path))
    logged = results["samples"][run.task]
    found.lm_eval_version = str(results["lm_eval_version"])
    if files.kind == "loglikelihood_rolling":
        found.texts += own_texts(logged, items, files.yaml_path)
    else:
        found.samples += own_samples(logged, items, files.kind, run.metric, files.yaml_path)


def _run_benchmark(run: EvalRun, endpoint: Endpoint, hooks: Hooks) -> _Found:
    """One of lm-eval's own tasks. Its data come from a hub, so its identity is the hash of what was asked."""
    found = _Found("", "benchmark", _scoring_model(run, endpoint, hooks))
    tasks = _benchmark_tasks(run)
    places = {
        one: (task, place) for task in tasks for place, one in enumerate(benchmark_ids(task, run.items))
    }
    for part in _parts(run, list(places), found, hooks):
        of_task: dict[str, list[int]] = {}
        for task, place in (places[one] for one in part):
            of_task.setdefault(task.task_name, []).append(place)
        asked_tasks = [task for task in tasks if task.task_name in of_task]
        # In rising order: lm-eval pairs them with what it reads of the data set by position.
        chosen = {name: sorted(numbers) for name, numbers in of_task.items()}
        results = _evaluate(run, found.model, asked_tasks, f"lm-eval task {run.task}", chosen)
        found.lm_eval_version = str(results["lm_eval_version"])
        answered = {s.id: s for s in benchmark_samples(results["samples"], run.metric, run.filter)}
        found.samples += [answered[one] for one in part]
    asked = "".join(sample.doc_hash + sample.prompt_hash + sample.target_hash for sample in found.samples)
    found.sha256 = hashlib.sha256(asked.encode()).hexdigest()
    return found


def _summed(run: EvalRun, found: _Found) -> TaskScores:
    samples, model = found.samples, found.model
    right = sum(sample.correct for sample in samples)
    return TaskScores(
        task=run.task,
        kind=found.kind,
        n=len(samples) or len(found.texts),
        accuracy=right / len(samples) if samples else None,
        accuracy_ci=wilson_interval(right, len(samples), CONFIDENCE) if samples else None,
        slices=slice_scores(samples, CONFIDENCE),
        samples=samples,
        texts=found.texts,
        format=TaskFormat(
            chat_template=run.chat_template,
            fewshot=run.fewshot,
            bos_tokens=max(model.bos_tokens, default=None),
            truncated_prompts=len(model.truncated_items),
            empty_answers=sum(1 for s in samples if s.generated is not None and not s.generated.strip()),
            cut_answers=sum(1 for s in samples if s.cut),
        ),
    )


def _refuse_constant(samples: Sequence[Sample]) -> None:
    """An engine that gives every choice of every item one score has not read a single prompt."""
    scored = [sample.loglikelihoods for sample in samples if len(sample.loglikelihoods) > 1]
    if scored and all(len(set(values)) == 1 for values in scored):
        raise EngineFailedError(
            f"the engine gave all choices of all {len(scored)} items the same score: it isn't scoring them"
        )


def evalset_sha256(items_path: Path, yaml_path: Path) -> str:
    """Identity of an eval set: its items and its task yaml, not its README."""
    parts = f"{sha256_file(items_path)} {sha256_file(yaml_path)}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _evaluate(
    run: EvalRun, model: Any, tasks: list[Any], where: str, chosen: Mapping[str, list[int]] | None = None
) -> dict[str, Any]:
    """lm-eval's results, every argument explicit. `chosen`: task -> places of the items that are asked; None: all of them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        results = simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=run.fewshot,
            limit=None,  # the sample is chosen here, not by lm-eval
            samples=None if chosen is None else dict(chosen),
            use_cache=None,  # it is keyed by the request, not by the model
            cache_requests=False,
            bootstrap_iters=0,  # lm-eval's errors are unpaired; ours are in statistics.py
            log_samples=True,
            apply_chat_template=run.chat_template,
            fewshot_as_multiturn=run.chat_template,
            system_instruction=None,
            random_seed=run.seed,
            numpy_random_seed=run.seed,
            torch_random_seed=None,
            fewshot_random_seed=run.seed,
        )
    except QuantgateError:
        raise
    except Exception as error:
        raise UserInputError(f"{where}: lm-eval can't run this task ({one_line(error)})") from error
    if results is None:
        raise EngineFailedError("lm-eval returned no results")
    return dict(results)


def _benchmark_tasks(run: EvalRun) -> list[Any]:
    """lm-eval's own task or a group's tasks, loaded; `UserInputError` before the first request when an item was calibrated on."""
    from lm_eval.tasks import TaskManager

    try:
        tasks = list(TaskManager().load(run.task)["tasks"].values())
    except Exception as error:
        raise UserInputError(f"lm-eval task {run.task}: can't be loaded ({one_line(error)})") from error
    if run.calibration:
        check_no_leak([item for task in tasks for item in benchmark_items(task, run.items)], run.calibration)
    return tasks


def _scoring_model(run: EvalRun, endpoint: Endpoint, hooks: Hooks) -> Any:
    """The client, every argument explicit; `UserInputError` where the model folder has no tokenizer that loads."""
    from pipeline.quality.completions import ScoringModel

    try:
        return ScoringModel(
            allow_truncated=run.allow_truncated,
            brings_bos=run.chat_template,
            cache=hooks.cache,
            guard=StallGuard(hooks.progress, hooks.stall_timeout_s),
            model=endpoint.served_name,
            base_url=f"{endpoint.base_url}/v1/completions",
            tokenizer=str(endpoint.tokenizer_dir),
            tokenizer_backend="huggingface",
            tokenized_requests=True,  # the endpoint must not tokenize (or add a BOS) by itself
            add_bos_token=False,  # the client decides by what the tokenizer itself does
            trust_remote_code=False,
            truncate=False,
            max_gen_toks=ANSWER_TOKENS,
            max_length=endpoint.max_length,  # the default, 2048, cuts prompts or overruns the server
            num_concurrent=run.concurrency,
            prompts_per_request=run.prompts_per_request,
            batch_size=1,  # the client batches by itself, and only what is scored
            max_retries=1,  # a retry would hide an engine that answers only sometimes
            timeout=NO_LIMIT_S,  # a request may wait behind others for as long as the engine works: `StallGuard` looks after it
            seed=run.seed,
        )
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"lm-eval can't tokenize here ({one_line(error)}); build the orchestrator environment again"
        ) from error
    except Exception as error:
        raise UserInputError(
            f"{endpoint.tokenizer_dir}: no tokenizer can be loaded ({one_line(error)})"
        ) from error


def _raise_engine_failure(error: EngineFailedError, check: Callable[[], None], log_path: Path) -> NoReturn:
    """The engine's own cause if it is dead, else the error seen here. A dying engine is given a moment to be dead."""
    from pipeline.quality.completions import EndpointError

    check()
    deadline = time.monotonic() + (DYING_WAIT_S if isinstance(error, EndpointError) else 0.0)
    while time.monotonic() < deadline:
        time.sleep(0.25)
        check()
    raise EngineFailedError(f"{error}; the engine is still alive; the eval's log is {log_path}") from error


@contextlib.contextmanager
def _quiet(log_path: Path, offline: bool) -> Iterator[None]:
    """lm-eval and its libraries log to a file and, if `offline`, stay off the network; everything is put back afterwards."""
    environment = {
        **({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if offline else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "NO_PROXY": ",".join(part for part in (os.environ.get("NO_PROXY"), "127.0.0.1") if part),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    handler = logging.FileHandler(log_path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message).2000s"))
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    states = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            import datasets

            datasets.disable_progress_bars()
            yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, propagate, level in states:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
