"""Rebuild the runs of one set of results: never twice, never half."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline.report.bundle import ResultBundle
from pipeline.tracking.content import (
    RunContent,
    comparison_content,
    flip_columns,
    gate_columns,
    proof_columns,
    variant_content,
    verdict_columns,
)
from pipeline.tracking.store import artifact_root, delete_run, open_client, open_experiment, usable_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COMPARISON = "comparison"
"""Key of the comparison run's files; also its name, after the profile."""
Artifacts = Mapping[str, Mapping[str, Path]]
"""Variant name or `COMPARISON` -> name of the file in the run -> file. The same names in every variant's run: the
comparison page shows what runs have in common."""
_BATCH = 1000  # metrics per call that MLflow takes (mlflow 3.17 utils/validation.py, MAX_METRICS_PER_BATCH)


@dataclass(frozen=True)
class TrackSummary:
    """What `track` found and did. `runs` is variant -> run id."""

    tracking_uri: str
    experiment: str
    experiment_id: str
    fingerprint: str
    comparison_run_id: str
    runs: dict[str, str]
    written: bool
    """False when a complete set for this fingerprint was there already."""
    replaced: int
    """Runs of an interrupted set that were deleted."""

    @property
    def comparison_page(self) -> str:
        """Path in the MLflow UI of the page that compares the variants, to be put behind the server's address."""
        runs, experiments = (
            quote(json.dumps(ids, separators=(",", ":")))
            for ids in (list(self.runs.values()), [self.experiment_id])
        )
        return f"/#/compare-runs?runs={runs}&experiments={experiments}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "comparison_page": self.comparison_page}


def track(
    bundle: ResultBundle,
    *,
    tracking_uri: str,
    experiment: str,
    fingerprint: str,
    artifacts: Artifacts,
) -> TrackSummary:
    """Make sure that exactly one complete set of runs exists for `fingerprint`.

    Files in `artifacts` that don't exist are left out.
    The set is one run per variant below a comparison run. Only when everything is in is each run marked complete, the
    comparison run last; a set without that mark is what an interruption left, and is replaced.
    Raises `EnvironmentUnfitError` with MLflow's reason when the store can't be used.
    """
    with usable_store(tracking_uri):
        client = open_client(tracking_uri)
        root = artifact_root(tracking_uri)
        experiment_id = open_experiment(client, experiment, root)
        existing = _runs_of(client, experiment_id, fingerprint)
        found = _complete_set(existing, bundle)
        if found is None:
            for run in existing:
                delete_run(client, run, root)
        ids = found or _write(client, experiment_id, fingerprint, bundle, artifacts)
    return TrackSummary(
        tracking_uri=tracking_uri,
        experiment=experiment,
        experiment_id=experiment_id,
        fingerprint=fingerprint,
        comparison_run_id=ids[COMPARISON],
        runs={variant: ids[variant] for variant in bundle.variants},
        written=found is None,
        replaced=len(existing) if found is None else 0,
    )


def result_artifacts(folder: str | Path, bundle: ResultBundle) -> dict[str, dict[str, Path]]:
    """The files of `results/` by run, as `track` takes them."""
    root = Path(folder)
    weights = {row.variant: row.weights for row in bundle.plan.rows}
    files = {
        variant: {
            "measure.json": root / "measure" / f"{variant}.json",
            "requests.parquet": root / "measure" / f"{variant}.requests.parquet",
            "timeline.jsonl": root / "measure" / f"{variant}.timeline.jsonl",
            "quality.json": root / "quality" / f"{variant}.json",
            "logprobs.parquet": root / "quality" / f"{variant}.logprobs.parquet",
            "quantize.json": root / "quantize" / f"{weights.get(variant)}.json",
        }
        for variant in bundle.variants
    }
    names = ("report.html", "report.md", "verdict.json", "plan.json", "environment.json")
    return {**files, COMPARISON: {name: root / name for name in names}}


def _runs_of(client: MlflowClient, experiment_id: str, fingerprint: str) -> list[Run]:
    """All runs of this fingerprint that aren't deleted."""
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], f"tags.fingerprint = '{fingerprint}'", page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def _complete_set(runs: list[Run], bundle: ResultBundle) -> dict[str, str] | None:
    """Run ids by variant and `COMPARISON` when `runs` is exactly one complete set of them, otherwise None."""
    ids = {
        run.data.tags.get("variant", COMPARISON): run.info.run_id
        for run in runs
        if run.data.tags.get("complete") == "true" and run.info.status == "FINISHED"
    }
    whole = len(runs) == len(ids) and ids.keys() == {*bundle.variants, COMPARISON}
    return ids if whole else None


def _write(
    client: MlflowClient,
    experiment_id: str,
    fingerprint: str,
    bundle: ResultBundle,
    artifacts: Artifacts,
) -> dict[str, str]:
    """Write the whole set; on an error the runs begun so far are marked failed."""
    shared = {"fingerprint": fingerprint, **git_tags()}
    begun: dict[str, str] = {}
    try:
        comparison = comparison_content(bundle, f"{bundle.verdict.profile} {COMPARISON}")
        parent = begun[COMPARISON] = _begin(client, experiment_id, comparison, shared)
        _log(client, parent, comparison, artifacts.get(COMPARISON, {}))
        client.log_table(parent, verdict_columns(bundle), "verdict_table.json")
        if proofs := proof_columns(bundle):
            client.log_table(parent, proofs, "quantization_proof.json")
        # The runs page lists the newest first: begun last to first, the reference stands on top.
        for variant in reversed(bundle.variants):
            content = variant_content(bundle, variant)
            tags = {**shared, "mlflow.parentRunId": parent}
            begun[variant] = _begin(client, experiment_id, content, tags)
            _log(client, begun[variant], content, artifacts.get(variant, {}))
            if bundle.verdict.variants[variant].gates:
                client.log_table(begun[variant], gate_columns(bundle.verdict.variants[variant]), "gates.json")
            if flips := flip_columns(bundle, variant):
                client.log_table(begun[variant], flips, "flipped_items.json")
        for key in [*bundle.variants, COMPARISON]:
            client.set_tag(begun[key], "complete", "true")
            client.set_terminated(begun[key], "FINISHED")
    except BaseException:
        for run_id in begun.values():
            client.set_terminated(run_id, "FAILED")
        raise
    return begun


def _begin(client: MlflowClient, experiment_id: str, content: RunContent, tags: Mapping[str, str]) -> str:
    run = client.create_run(experiment_id, run_name=content.name, tags={**content.tags, **tags})
    return str(run.info.run_id)


def _log(client: MlflowClient, run_id: str, content: RunContent, files: Mapping[str, Path]) -> None:
    from mlflow.entities import Metric, Param

    now_ms = int(time.time() * 1000)
    metrics = [Metric(point.key, point.value, now_ms, point.step) for point in content.metrics]
    client.log_batch(run_id, params=[Param(key, value) for key, value in content.params.items()])
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + _BATCH])
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            if path.is_file():
                shutil.copyfile(path, Path(folder, name))
        client.log_artifacts(run_id, folder)


def git_tags() -> dict[str, str]:
    """The commit of the working directory and whether it has changes; empty outside a repository."""
    commit = _git("rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"git_commit": commit, "git_dirty": str(changed).lower(), "mlflow.source.git.commit": commit}


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
