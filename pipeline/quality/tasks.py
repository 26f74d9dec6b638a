"""lm-eval tasks as ours: a set's yaml read with errors that name it, and lm-eval's logged samples made into `Sample`s.

Two origins. A team's own set is a folder with a yaml and items, every item checked and paired by its own id. A published
benchmark is one of lm-eval's own tasks by name, for machines that reach a hub; its items are known by their place in it.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.files import write_text
from pipeline.quality.evalset import Item, TaskKind, check_no_leak, load_items
from pipeline.results import RollingText, Sample
from pipeline.settings import Settings
from pipeline.texts import load_texts

KINDS: tuple[TaskKind, ...] = ("multiple_choice", "generate_until", "loglikelihood_rolling")


@dataclass(frozen=True)
class TaskFiles:
    """A team's task: lm-eval's configuration, the items file, the yaml, and what kind of task it is."""

    config: dict[str, Any]
    items_path: Path
    yaml_path: Path
    kind: TaskKind

    @functools.cached_property
    def items(self) -> list[Item]:
        """The whole set, every item checked; `UserInputError` names file, line and field."""
        return load_items(self.items_path, self.kind)


def refuse_leaks(settings: Settings) -> None:
    """Raise `UserInputError` when an eval item is calibration text: quality would be measured on what was tuned on.

    Benchmarks of lm-eval's own come from a hub; the runner looks at them once they are there (`benchmark_items`).
    """
    evalset = settings.evalset
    if evalset.folder is None or not settings.quantizers:
        return
    texts = load_texts(settings.calibration.file)
    for task in evalset.own_tasks:
        check_no_leak(read_task(Path(evalset.folder), task.task).items, texts)


def read_task(folder: Path, task: str) -> TaskFiles:
    """The task `task` of an eval set's folder. `UserInputError` says what is wrong with it."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    if not folder.is_dir():
        raise UserInputError(f"{folder}: no such eval set folder")
    try:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
    except Exception as error:
        raise UserInputError(f"{folder}: a task yaml can't be read ({one_line(error)})") from None
    entry = manager.task_index.get(task)
    if entry is None or entry.yaml_path is None:
        found = ", ".join(manager.all_subtasks) or "none"
        raise UserInputError(f"{folder}: no task {task!r} in its yaml files; there: {found}")
    yaml_path = Path(entry.yaml_path)
    try:
        config: dict[str, Any] = load_yaml(yaml_path, resolve_func=True)
    except Exception as error:
        raise UserInputError(f"{yaml_path}: can't be read ({one_line(error)})") from None
    kind = config.get("output_type")
    if kind not in KINDS:
        raise UserInputError(f"{yaml_path}: output_type: {kind!r}; allowed are {', '.join(KINDS)}")
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
    ends = config.get("generation_kwargs") or {}
    if kind == "generate_until" and not (ends.get("until") and ends.get("max_gen_toks")):
        raise UserInputError(
            f"{yaml_path}: generation_kwargs must give until and max_gen_toks; lm-eval's defaults end an answer at a blank "
            "line or after 256 tokens"
        )
    return TaskFiles(config, folder / files[split], yaml_path, kind)


def with_data(config: Mapping[str, Any], sampled: Path, cache_dir: Path) -> dict[str, Any]:
    """The configuration over the sampled items, with a dataset cache of its own."""
    kwargs = dict(config.get("dataset_kwargs") or {})
    kwargs["data_files"] = {config["test_split"]: str(sampled.resolve())}
    kwargs["cache_dir"] = str(cache_dir.resolve())
    return {**config, "dataset_kwargs": kwargs}


def write_sampled(items_path: Path, items: Sequence[Item], target: Path) -> Path:
    """The chosen items' own lines in the chosen order, unchanged: a team's yaml may use fields that we don't know."""
    with items_path.open(encoding="utf-8") as file:
        lines = {str(json.loads(line)["id"]): line.strip() for line in file if line.strip()}
    return write_text(target, "".join(f"{lines[item.id]}\n" for item in items))


# --- what came back -------------------------------------------------------------------------------------------


def own_samples(
    logged: Sequence[Mapping[str, Any]],
    items: Sequence[Item],
    kind: TaskKind,
    metric: str | None,
    where: Path,
) -> list[Sample]:
    """lm-eval's logged samples of a team's task, in the items' order; every item exactly once."""
    by_id = _once_each(logged, items, where)
    read: Callable[[Mapping[str, Any], Item], Sample] = (
        (lambda entry, item: _chosen(entry, item, where))
        if kind == "multiple_choice"
        else (lambda entry, item: _generated(entry, item, metric, where))
    )
    return [read(by_id[item.id], item) for item in items]


def own_texts(logged: Sequence[Mapping[str, Any]], items: Sequence[Item], where: Path) -> list[RollingText]:
    """The likelihoods of a rolling task's texts."""
    by_id = _once_each(logged, items, where)
    return [
        RollingText(
            id=item.id,
            slice=item.slice,
            cluster=item.cluster,
            doc_hash=by_id[item.id]["doc_hash"],
            loglikelihood=float(by_id[item.id]["filtered_resps"][0]),
            utf8_bytes=len(item.prompt.encode()),
        )
        for item in items
    ]


def benchmark_samples(
    logged: Mapping[str, Sequence[Mapping[str, Any]]], metric: str | None, filter_name: str
) -> list[Sample]:
    """Samples of lm-eval's own task or group: the slice is the subtask, the id its place there."""
    found = []
    for task, entries in sorted(logged.items()):
        kept = [entry for entry in entries if entry["filter"] == filter_name]
        if not kept:
            there = ", ".join(sorted({entry["filter"] for entry in entries}))
            raise UserInputError(f"{task}: has no filter {filter_name!r}; allowed: {there}")
        for entry in sorted(kept, key=lambda one: int(one["doc_id"])):
            found.append(_benchmark_sample(entry, task, metric))
    return found


def benchmark_items(task: Any, limit: int | None) -> list[Item]:
    """What a leak of lm-eval's own task would be found by, of its first `limit` items; ids as in `benchmark_samples`.

    An item's parts have one id: its prompt (without examples), its longest text (a question whose options or instructions
    would be most of the prompt, or a solution), and an answer that isn't one of several choices.
    """
    name, found = task.config.task, []
    for place, doc in itertools.islice(enumerate(task.eval_docs), limit):
        target, prompt = task.doc_to_target(doc), task.doc_to_text(doc)
        chosen = task.config.doc_to_choice is not None and isinstance(target, int)
        right = task.doc_to_choice(doc)[target] if chosen else target
        texts = [value for value in doc.values() if isinstance(value, str)]
        parts = [prompt if isinstance(prompt, str) else "", max(texts, key=len, default="")]
        parts += [] if chosen else _texts(right)
        identity = _place(name, place)
        answer = " ".join(_texts(right))  # beside a prompt that is too short to be looked for alone
        found += [
            Item(identity, name, identity, part, (), 0, answer if part == prompt else "") for part in parts
        ]
    return found


def benchmark_ids(task: Any, limit: int | None) -> list[str]:
    """The ids of the first `limit` items of lm-eval's own task, in their places; None: of all."""
    count = len(task.eval_docs)
    return [_place(task.config.task, place) for place in range(count if limit is None else min(limit, count))]


def _texts(target: Any) -> list[str]:
    """A target as its texts: some tasks take any of several."""
    return [str(one) for one in (target if isinstance(target, list | tuple) else [target])]


def _place(task: str, place: int) -> str:
    return f"{task}-{place:05}"


def _once_each(
    logged: Sequence[Mapping[str, Any]], items: Sequence[Item], where: Path
) -> dict[str, Mapping[str, Any]]:
    by_id = {str(entry["doc"]["id"]): entry for entry in logged}
    if len(by_id) != len(logged) or set(by_id) != {item.id for item in items}:
        raise UserInputError(
            f"{where}: the task scored {len(by_id)} of {len(items)} items; process_docs may not drop any, and there may be "
            "one filter"
        )
    return by_id


def _chosen(entry: Mapping[str, Any], item: Item, where: Path) -> Sample:
    loglikelihoods = [float(value) for value, _ in entry["filtered_resps"]]
    if len(loglikelihoods) != len(item.choices) or entry["target"] != item.answer:
        raise UserInputError(
            f"{where}: item {item.id} has {len(item.choices)} choices and answer {item.answer}, the task scored "
            f"{len(loglikelihoods)} against {entry['target']!r}; doc_to_choice and doc_to_target must give the item's own"
        )
    chosen = max(range(len(loglikelihoods)), key=loglikelihoods.__getitem__)  # the first of equals
    return Sample(
        **_shared(entry, item.id, item.slice, item.cluster),
        correct=chosen == item.answer,
        chosen=chosen,
        target=item.answer,
        loglikelihoods=loglikelihoods,
        choices=list(item.choices),
        expected=item.right,
    )


def _generated(entry: Mapping[str, Any], item: Item, metric: str | None, where: Path) -> Sample:
    if str(entry["target"]) != item.expected:
        raise UserInputError(
            f"{where}: item {item.id} has the answer {item.expected!r}, the task compares with {entry['target']!r}; "
            "doc_to_target must give the item's own"
        )
    return Sample(
        **_shared(entry, item.id, item.slice, item.cluster),
        correct=_is_right(entry, metric, str(where)),
        chosen=None,
        target=None,
        loglikelihoods=[],
        generated=str(entry["filtered_resps"][0]),
        expected=item.expected,
        cut=_was_cut(entry),
    )


def _benchmark_sample(entry: Mapping[str, Any], task: str, metric: str | None) -> Sample:
    identity = _place(task, int(entry["doc_id"]))
    shared = _shared(entry, identity, task, identity)
    correct = _is_right(entry, metric, task)
    first = entry["filtered_resps"][0]
    if isinstance(first, str):
        return Sample(
            **shared, correct=correct, chosen=None, target=None, loglikelihoods=[], generated=first,
            expected=str(entry["target"]), cut=_was_cut(entry),
        )  # fmt: skip
    loglikelihoods = [float(value) for value, _ in entry["filtered_resps"]]
    choices = [str(arguments[1]) for arguments in entry["arguments"]]
    target = entry["target"] if isinstance(entry["target"], int) else None
    return Sample(
        **shared,
        correct=correct,
        chosen=max(range(len(loglikelihoods)), key=loglikelihoods.__getitem__),
        target=target,
        loglikelihoods=loglikelihoods,
        choices=choices,
        expected=choices[target] if target is not None and target < len(choices) else str(entry["target"]),
    )


def _shared(entry: Mapping[str, Any], identity: str, slice_name: str, cluster: str) -> dict[str, Any]:
    return {
        "id": identity,
        "slice": slice_name,
        "cluster": cluster,
        "doc_hash": entry["doc_hash"],
        "prompt_hash": entry["prompt_hash"],
        "target_hash": entry["target_hash"],
        "prompt": str(entry["arguments"][0][0]),
    }


def _is_right(entry: Mapping[str, Any], metric: str | None, where: str) -> bool:
    """The metric's verdict on one item: a paired test of accuracies needs right or wrong."""
    if metric is None or metric not in entry:
        there = ", ".join(entry.get("metrics", [])) or "none"
        raise UserInputError(f"{where}: the eval set's metric is {metric!r}; the task has {there}")
    value = entry[metric]
    if isinstance(value, list | tuple) or float(value) not in (0.0, 1.0):
        raise UserInputError(
            f"{where}: metric {metric!r} gave {value!r} for an item; allowed are metrics that say right (1) or wrong (0)"
        )
    return float(value) == 1.0


def _was_cut(entry: Mapping[str, Any]) -> bool:
    return any(getattr(text, "cut", False) for texts in entry["resps"] for text in texts)


def one_line(error: BaseException) -> str:
    """An error of someone else's as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
