"""Stands in for `pipeline/__main__.py` in a clone: stages that only write down what they were given and what they read.

The graph, the confs and the links are the real ones, and so is the stage `environment`; only work is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from pipeline.environments import interpreter
from pipeline.runs import point_at


def main() -> int:
    stage, profile, *item = sys.argv[1:]
    with open(os.environ["RECORDED_STAGES"], "a", encoding="utf-8") as file:
        file.write(f"{' '.join([stage, *item])}\n")
    if stage == "environment":
        return subprocess.run(
            [interpreter("orchestrator"), "-m", "pipeline.stages.environment", profile], check=False
        ).returncode
    point_at(profile)
    name = item[0] if item else ""
    results, weights = Path("results"), Path("artifacts/weights")
    written = {
        "prepare": [weights / "bf16" / "config.json", results / "prepare.json"],
        "quantize": [weights / name / "config.json", results / "quantize" / f"{name}.json"],
        "plan": [results / "plan.json", *_plans(profile)],
        "measure": [results / "measure" / f"{name}.{kind}" for kind in _MEASURED],
        "quality": [results / "quality" / f"{name}.{kind}" for kind in ("json", "logprobs.parquet")],
        "verdict": [results / "verdict.json"],
        "report": [results / "report.html", results / "report.md"],
        "track": [results / "tracking.json"],
    }[stage]
    read = {
        "quantize": [weights / "bf16/config.json"],
        "plan": [*weights.glob("*/config.json"), results / "prepare.json"],
        "measure": [results / "environment.json", results / f"plan/{name}.json"],
        "quality": [results / f"measure/{name}.engine.json"],
        "verdict": [*results.glob("measure/*.json"), *results.glob("quality/*.json")],
        "report": [results / "verdict.json", *results.glob("quantize/*.json")],
        "track": [results / "report.html"],
    }.get(stage, [])
    texts = [path.read_text() for path in sorted(read)]
    stamps = {json.loads(text).get("profile", profile) for text in texts}
    conf = Path(f"conf/variant/{name}.yaml")
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"profile": profile, "stage": stage, "item": name, "read": sorted(stamps)}
        content["digest"] = hashlib.sha256("".join(texts).encode()).hexdigest()
        if stage == "measure":
            content["variant"] = conf.read_text()
        path.write_text(json.dumps(content))
    return 0


_MEASURED = ("json", "engine.json", "requests.parquet", "timeline.jsonl")


def _plans(profile: str) -> list[Path]:
    text = Path(f"conf/profile/{profile}.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("variant_names:")]
    names = line.partition("[")[2].rstrip("]").split(", ")
    return [Path("results/plan") / f"{name}.json" for name in names]


if __name__ == "__main__":
    sys.exit(main())
