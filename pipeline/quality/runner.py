"""Runs an eval set through a served variant with lm-eval and returns what each item was answered.

Everything that lm-eval would decide by default is said here (context length, delimiter checks, cache, chat template, number of
examples), because a default that differs between two runs looks like a quality difference. It must not start an engine:
the stage passes the endpoint and a `check` that raises with the cause when the engine behind it is dead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import EngineFailedError, EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.files import sha256_file, write_text
from pipeline.quality.evalset import Item, load_items, sample_items
from pipeline.quality.intervals import wilson_interval
from pipeline.quality.statistics import slice_scores
from pipeline.results import Provenance, Quality, Sample, SliceScore

DYING_WAIT_S = 3.0
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
    """What to ask. `items` None asks all; `seed` picks the sample, the same for every variant.

    `concurrency` is the number of scoring requests in flight. Whether it changes answers is the engine's matter: with
    max_num_seqs=1 on the server each step computes one whole prompt, so that nothing depends on arrival times.
    """

    folder: Path
    task: str
    items: int | None
    seed: int
    concurrency: int
    confidence: float = 0.95
    allow_truncated: bool = False
    request_timeout_s: int = 300


@dataclass(frozen=True)
class Scores:
    """What came back, before anything is compared. Accuracy is that of the highest summed loglikelihood."""

    evalset_sha256: str
    samples: list[Sample]
    accuracy: float
    accuracy_ci: tuple[float, float]
    slices: dict[str, SliceScore]
    truncated_prompts: int
    lm_eval_version: str
    wall_s: float

    def as_quality(
        self, variant: str, profile: str, evalset: str, seed: int, provenance: Provenance
    ) -> Quality:
        """The result file's record."""
        return Quality(
            variant=variant,
            profile=profile,
            evalset=evalset,
            evalset_sha256=self.evalset_sha256,
            sample_seed=seed,
            n=len(self.samples),
            accuracy=self.accuracy,
            accuracy_ci=self.accuracy_ci,
            slices=self.slices,
            samples=self.samples,
            truncated_prompts=self.truncated_prompts,
            lm_eval_version=self.lm_eval_version,
            provenance=provenance,
            wall_s=self.wall_s,
        )


def run_quality(
    run: EvalRun, endpoint: Endpoint, work_dir: Path, check: Callable[[], None] = lambda: None
) -> Scores:
    """Score the sampled items through `endpoint`. lm-eval's own log goes to `work_dir/lm-eval.log`.

    Errors: `UserInputError` (eval set or task yaml wrong, prompts too long), `EngineFailedError` (no answer, or one that is no
    score: missing or non-finite logprobs; `check()` is asked for the cause first).
    """
    started = time.monotonic()
    work_dir.mkdir(parents=True, exist_ok=True)
    log_path = work_dir / "lm-eval.log"
    with _quiet(log_path):
        try:
            config, items_path, yaml_path = task_config(run.folder, run.task)
            items = sample_items(load_items(items_path), run.items, run.seed)
            sampled = _write_sampled(items_path, items, work_dir / "items.jsonl")
            results, model = _evaluate(run, endpoint, _with_data(config, sampled, work_dir), yaml_path)
        except EngineFailedError as error:
            _raise_engine_failure(error, check, log_path)
        finally:
            shutil.rmtree(work_dir / DATASET_CACHE, ignore_errors=True)
    samples = _samples(results["samples"][run.task], items, yaml_path)
    right = sum(sample.correct for sample in samples)
    return Scores(
        evalset_sha256=evalset_sha256(items_path, yaml_path),
        samples=samples,
        accuracy=right / len(samples),
        accuracy_ci=wilson_interval(right, len(samples), run.confidence),
        slices=slice_scores(samples, run.confidence),
        truncated_prompts=len(model.truncated_items),
        lm_eval_version=str(results["lm_eval_version"]),
        wall_s=time.monotonic() - started,
    )


def evalset_sha256(items_path: Path, yaml_path: Path) -> str:
    """Identity of an eval set: its items and its task yaml, not its README."""
    import hashlib

    parts = f"{sha256_file(items_path)} {sha256_file(yaml_path)}"
    return hashlib.sha256(parts.encode()).hexdigest()


def task_config(folder: Path, task: str) -> tuple[dict[str, Any], Path, Path]:
    """The task's lm-eval configuration, its items file and its yaml. `UserInputError` says what is wrong with the folder."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    if not folder.is_dir():
        raise UserInputError(f"{folder}: no such eval set folder")
    try:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
    except Exception as error:
        raise UserInputError(f"{folder}: a task yaml can't be read ({_one_line(error)})") from None
    entry = manager.task_index.get(task)
    if entry is None or entry.yaml_path is None:
        found = ", ".join(manager.all_subtasks) or "none"
        raise UserInputError(f"{folder}: no task {task!r} in its yaml files; there: {found}")
    yaml_path = Path(entry.yaml_path)
    try:
        config: dict[str, Any] = load_yaml(yaml_path, resolve_func=True)
    except Exception as error:
        raise UserInputError(f"{yaml_path}: can't be read ({_one_line(error)})") from None
    output_type = config.get("output_type")
    if output_type != "multiple_choice":
        raise UserInputError(f"{yaml_path}: output_type: {output_type!r}; allowed is multiple_choice")
    if config.get("dataset_path") != "json":
        raise UserInputError(
            f"{yaml_path}: dataset_path: {config.get('dataset_path')!r}; allowed is json, with a local file"
        )
    split = config.get("test_split")
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if not isinstance(files, Mapping) or not isinstance(files.get(split), str):
        raise UserInputError(
            f"{yaml_path}: dataset_kwargs.data_files: needs one file under test_split ({split!r})"
        )
    return config, folder / files[split], yaml_path


def _with_data(config: Mapping[str, Any], sampled: Path, work_dir: Path) -> dict[str, Any]:
    """The configuration over the sampled items, with a dataset cache of its own."""
    kwargs = dict(config.get("dataset_kwargs") or {})
    kwargs["data_files"] = {config["test_split"]: str(sampled.resolve())}
    kwargs["cache_dir"] = str((work_dir / DATASET_CACHE).resolve())
    return {**config, "dataset_kwargs": kwargs}


def _write_sampled(items_path: Path, items: Sequence[Item], target: Path) -> Path:
    """The chosen items' own lines, unchanged: a team's yaml may use fields that we don't know."""
    wanted = {item.id for item in items}
    with items_path.open(encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
    return write_text(target, "".join(f"{line}\n" for line in lines if str(json.loads(line)["id"]) in wanted))


def _evaluate(
    run: EvalRun, endpoint: Endpoint, config: Mapping[str, Any], yaml_path: Path
) -> tuple[dict[str, Any], Any]:
    """lm-eval's results and the client that asked, every argument explicit."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = _scoring_model(run, endpoint)
    try:
        results = simple_evaluate(
            model=model,
            tasks=[dict(config)],
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=None,
            limit=None,
            use_cache=None,  # it is keyed by the request, not by the model
            cache_requests=False,
            bootstrap_iters=0,  # lm-eval's errors are unpaired; ours are in statistics.py
            log_samples=True,
            apply_chat_template=False,
            random_seed=run.seed,
            numpy_random_seed=run.seed,
            torch_random_seed=None,
            fewshot_random_seed=run.seed,
        )
    except QuantgateError:
        raise
    except Exception as error:
        raise UserInputError(f"{yaml_path}: lm-eval can't run this task ({_one_line(error)})") from error
    if results is None:
        raise EngineFailedError("lm-eval returned no results")
    return dict(results), model


def _scoring_model(run: EvalRun, endpoint: Endpoint) -> Any:
    """The client, every argument explicit; `UserInputError` where the model folder has no tokenizer that loads."""
    from pipeline.quality.completions import ScoringModel

    try:
        return ScoringModel(
            allow_truncated=run.allow_truncated,
            model=endpoint.served_name,
            base_url=f"{endpoint.base_url}/v1/completions",
            tokenizer=str(endpoint.tokenizer_dir),
            tokenizer_backend="huggingface",
            tokenized_requests=True,  # the endpoint must not tokenize (or add a BOS) by itself
            add_bos_token=False,
            trust_remote_code=False,
            truncate=False,
            max_length=endpoint.max_length,  # the default, 2048, cuts prompts or overruns the server
            num_concurrent=run.concurrency,
            batch_size=1,  # several prompts in one request reach the scheduler in an order of its own
            max_retries=1,  # a retry would hide an engine that answers only sometimes
            timeout=run.request_timeout_s,
            seed=run.seed,
        )
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"lm-eval can't tokenize here ({_one_line(error)}); build the orchestrator environment again"
        ) from error
    except Exception as error:
        raise UserInputError(
            f"{endpoint.tokenizer_dir}: no tokenizer can be loaded ({_one_line(error)})"
        ) from error


def _samples(logged: Sequence[Mapping[str, Any]], items: Sequence[Item], yaml_path: Path) -> list[Sample]:
    """lm-eval's logged samples as ours, in the items' order; every item exactly once."""
    by_id = {str(entry["doc"]["id"]): entry for entry in logged}
    if len(by_id) != len(logged) or set(by_id) != {item.id for item in items}:
        raise UserInputError(
            f"{yaml_path}: the task scored {len(by_id)} of {len(items)} items; process_docs may not drop any"
        )
    return [_sample(by_id[item.id], item, yaml_path) for item in items]


def _sample(entry: Mapping[str, Any], item: Item, yaml_path: Path) -> Sample:
    loglikelihoods = [float(value) for value, _ in entry["filtered_resps"]]
    if len(loglikelihoods) != len(item.choices) or entry["target"] != item.answer:
        raise UserInputError(
            f"{yaml_path}: item {item.id} has {len(item.choices)} choices and answer {item.answer}, the task scored "
            f"{len(loglikelihoods)} against {entry['target']!r}; doc_to_choice and doc_to_target must give the item's own"
        )
    chosen = max(range(len(loglikelihoods)), key=loglikelihoods.__getitem__)  # the first of equals
    return Sample(
        id=item.id,
        slice=item.slice,
        cluster=item.cluster,
        doc_hash=entry["doc_hash"],
        prompt_hash=entry["prompt_hash"],
        target_hash=entry["target_hash"],
        correct=chosen == item.answer,
        chosen=chosen,
        target=item.answer,
        loglikelihoods=loglikelihoods,
        prompt=item.prompt,
        choices=list(item.choices),
        expected=item.choices[item.answer],
    )


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
def _quiet(log_path: Path) -> Iterator[None]:
    """lm-eval and its libraries log to a file and stay off the network; everything is put back afterwards."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
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


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
