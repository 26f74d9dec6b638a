"""How many requests an eval set's tasks make and how long they are, without a tokenizer or lm-eval.

A team's own items are counted from their files, 4 bytes to a token. Of lm-eval's published tasks, whose data is on a hub, the
lengths are the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import UserInputError
from pipeline.planning.roofline import Lengths
from pipeline.quality.evalset import load_items, sample_items
from pipeline.settings.schema import EvalsetSettings, TaskSettings

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of text in a token, as `pipeline/doctor/quantizing.py` counts, with its source."""
ANSWER_TOKENS = 256
"""lm-eval 0.4.13 models/api_models.py: max_gen_toks where a task names none."""


@dataclass(frozen=True)
class Scored:
    """One task: its requests, the items they belong to, and their lengths; an answer of one token is a scored choice."""

    task: str
    requests: int
    items: int
    lengths: Lengths


@dataclass(frozen=True)
class Published:
    """A published task's requests: `subtasks` that `items` are taken of each, `choices` requests an item."""

    subtasks: int
    items: int
    """Of all subtasks, where every item is taken."""
    choices: int
    prompt_tokens: int
    answer_tokens: int
    longest_answer: int


PUBLISHED = {
    # 8 worked examples of 541 tokens together (the task's yaml in lm-eval 0.4.13, 4 bytes a token) and a question; its yaml names
    # no max_gen_toks, so an answer ends at 256: taken as the mean, too.
    "gsm8k_cot": Published(1, 1_319, 1, 700, ANSWER_TOKENS, ANSWER_TOKENS),
    # 14 subjects. MMLU-Pro's own evaluation (evaluate_from_local.py) takes as many of 5 worked examples as leave 2,048 of 4,096
    # tokens for the answer, so a prompt has at most 2,048; max_gen_toks 2,048 in lm-eval's yaml. 400 tokens a mean answer is taken.
    "mmlu_pro": Published(14, 12_032, 1, 2_048, 400, 2_048),
    # 52 subjects, 1,346 validation items (arXiv 2305.08322, table 1); 4 letters to score; 6 questions of about 100 tokens.
    "ceval-valid": Published(52, 1_346, 4, 600, 1, 1),
}  # fmt: skip


def scored_tasks(evalset: EvalsetSettings) -> list[Scored]:
    """Every task of the set; `UserInputError` where one's lengths aren't known or its files can't be read."""
    found = []
    for task in (evalset, *evalset.further):
        published = evalset.folder is None or task.from_hub
        found.append(_published(task) if published else _own(Path(str(evalset.folder)), task, evalset.seed))
    return found


def _published(task: TaskSettings) -> Scored:
    known = PUBLISHED.get(task.task)
    if known is None:
        raise UserInputError(
            f"the lengths of lm-eval's task {task.task} aren't known here, only those of {', '.join(PUBLISHED)}"
        )
    items = known.items if task.items is None else known.subtasks * task.items
    requests = items * known.choices
    lengths = Lengths.of([known.prompt_tokens], [known.answer_tokens])
    longest = Lengths(
        lengths.prompt,
        lengths.prompt_squared,
        lengths.answer,
        lengths.answer_squared,
        float(known.longest_answer),
    )
    return Scored(task.task, requests, items, longest)


def _own(folder: Path, task: TaskSettings, seed: int) -> Scored:
    config = _task_config(folder, task.task)
    kind = config.get("output_type", "multiple_choice")
    data = config.get("dataset_kwargs", {}).get("data_files", {})
    path = folder / str(data.get(config.get("test_split"), "items.jsonl"))
    items = sample_items(load_items(path, kind), task.items, seed, task.slice_items)
    if kind == "multiple_choice":
        # A choice is scored as a prompt that ends with it, and one token more.
        prompts = [_tokens(item.prompt + choice) for item in items for choice in item.choices]
        return Scored(task.task, len(prompts), len(items), Lengths.of(prompts, [1]))
    answer = int(config.get("generation_kwargs", {}).get("max_gen_toks", ANSWER_TOKENS))
    prompts = [_tokens(item.prompt) for item in items]
    return Scored(
        task.task,
        len(prompts),
        len(items),
        Lengths.of(prompts, [answer if kind == "generate_until" else 1]),
    )


def _tokens(text: str) -> float:
    return max(1.0, len(text.encode()) / BYTES_PER_TOKEN)


class _Plain(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose own tags (lm-eval's !function) are read as text."""


_Plain.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def _task_config(folder: Path, task: str) -> dict[str, Any]:
    """The yaml of a task in a folder, not resolved: `quantgate plan` must not wait for lm-eval's imports."""
    for path in sorted(folder.glob("*.yaml")):
        try:
            found = yaml.load(path.read_text(encoding="utf-8"), _Plain)
        except (OSError, yaml.YAMLError) as error:
            raise UserInputError(f"{path}: can't be read ({str(error).splitlines()[0]})") from None
        if isinstance(found, dict) and found.get("task") == task:
            return found
    raise UserInputError(f"{folder}: no yaml with the task {task!r}")
