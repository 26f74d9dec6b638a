"""A small eval set as a team would bring it, and a run of it against a test server."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.quality.runner import Endpoint, EvalRun, Hooks, Scores, run_quality

ANIMALS = ["horse", "tiger", "eagle", "whale", "camel", "sheep", "snake", "mouse"]
YAML = """\
task: zoo
dataset_path: json
dataset_kwargs:
  data_files:
    test: items.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def page(index: int) -> str:
    return f"Page {index} of the zoo's book shows the {ANIMALS[index % 8]}. The animal on page {index} is the"


def zoo_items(count: int = 40) -> list[dict[str, Any]]:
    items = []
    for index in range(count):
        choices = [f" {ANIMALS[(index + offset) % 8]}" for offset in range(4)]
        answer = index % 4
        choices[0], choices[answer] = choices[answer], choices[0]
        items.append(
            {
                "id": f"page-{index}",
                "slice": "even" if index % 2 == 0 else "odd",
                "cluster": f"c{index // 2}",
                "prompt": page(index),
                "choices": choices,
                "answer": answer,
                "note": "a field of the team's own",
            }
        )
    return items


def write_items(folder: Path, items: list[dict[str, Any]]) -> None:
    (folder / "items.jsonl").write_text(
        "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    )


HOOKS = [entry.name for entry in fields(Hooks)]


def score(folder: Path, tokenizer: Path, server: Any, **changes: Any) -> Scores:
    """Run the eval set of `folder` against a test server; keywords are fields of `EvalRun` or of `Hooks`, or max_length."""
    max_length = changes.pop("max_length", 512)
    hooks = Hooks(**{key: changes.pop(key) for key in HOOKS if key in changes})
    values: dict[str, Any] = {"folder": folder, "task": "zoo", "items": None, "seed": 0, "concurrency": 4}
    endpoint = Endpoint(server.base_url, getattr(server, "served_name", "demo"), tokenizer, max_length)
    return run_quality(EvalRun(**(values | changes)), endpoint, folder.parent / "work", hooks)
