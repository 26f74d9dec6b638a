"""The tracking against the real MLflow on a temporary SQLite store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EnvironmentUnfitError, UserInputError
from pipeline.files import write_text
from pipeline.report import ResultBundle
from pipeline.results import save
from pipeline.tracking import COMPARISON, result_artifacts, track
from pipeline.tracking import track as _track_function
from pipeline.tracking.store import open_client
from tests.support.sample_results import LEVELS, SHAPES, sample_results

EXPERIMENT = "quantgate demo"


class Store:
    """One SQLite store with the sample results' files beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle: ResultBundle = sample_results()
        self.uri = f"sqlite:///{folder}/mlruns/mlflow.db"
        results = folder / "results"
        save(results / "verdict.json", self.bundle.verdict)
        write_text(results / "report.html", "<!doctype html><p>report")
        for name, measured in self.bundle.measurements.items():
            assert measured
            save(results / "measure" / f"{name}.json", measured)
            (results / "measure" / f"{name}.requests.parquet").write_bytes(b"PAR1")
        self.client = open_client(self.uri)

    def track(self, fingerprint: str) -> Any:
        return track(
            self.bundle,
            tracking_uri=self.uri,
            experiment=EXPERIMENT,
            fingerprint=fingerprint,
            artifacts=result_artifacts(self.folder / "results", self.bundle),
        )

    def runs(self, filter_string: str = "") -> list[Any]:
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        return (
            []
            if experiment is None
            else list(self.client.search_runs([experiment.experiment_id], filter_string))
        )

    def artifact_folders(self) -> set[str]:
        return {path.name for path in (self.folder / "mlruns" / "artifacts").iterdir()}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    yield Store(tmp_path_factory.mktemp("tracking"))


def test_one_run_per_variant_below_one_comparison(store: Store) -> None:
    summary = store.track("a1")
    runs = {run.info.run_id: run for run in store.runs("tags.fingerprint = 'a1'")}
    assert summary.written and len(runs) == len(SHAPES) + 1
    assert list(summary.runs) == list(SHAPES)
    for variant, run_id in summary.runs.items():
        tags = runs[run_id].data.tags
        assert tags["mlflow.parentRunId"] == summary.comparison_run_id
        assert tags["decision"] == store.bundle.verdict.variants[variant].decision
        assert runs[run_id].info.run_name == variant
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert all(run_id in summary.comparison_page for run_id in summary.runs.values())


def test_the_same_results_again_write_nothing(store: Store) -> None:
    first = store.track("a2")
    count, folders = len(store.runs()), store.artifact_folders()
    second = store.track("a2")
    assert not second.written and second.replaced == 0
    assert second.runs == first.runs and second.comparison_run_id == first.comparison_run_id
    assert len(store.runs()) == count and store.artifact_folders() == folders


def test_other_results_get_runs_of_their_own(store: Store) -> None:
    first, second = store.track("a3"), store.track("a4")
    assert not {*first.runs.values()} & {*second.runs.values()}
    assert len(store.runs("tags.fingerprint = 'a3'")) == len(SHAPES) + 1


@pytest.mark.parametrize("after_calls", [0, 1, 3, 6])
def test_an_interrupted_set_is_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch, after_calls: int
) -> None:
    """`after_calls` of 6 is an end between the last file and the marks."""
    module = __import__("sys").modules[_track_function.__module__]
    fingerprint = f"b{after_calls}"
    calls = 0
    log = module._log

    def interrupted_log(*arguments: Any) -> None:
        nonlocal calls
        if calls == after_calls:
            raise KeyboardInterrupt
        calls += 1
        log(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_log", interrupted_log)
        if after_calls == 6:
            patch.setattr(
                type(store.client), "set_tag", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
            )
        with pytest.raises(KeyboardInterrupt):
            store.track(fingerprint)
    left = store.runs(f"tags.fingerprint = '{fingerprint}'")
    assert left and {run.info.status for run in left} == {"FAILED"}
    summary = store.track(fingerprint)
    assert summary.written and summary.replaced == len(left)
    assert len(store.runs(f"tags.fingerprint = '{fingerprint}'")) == len(SHAPES) + 1
    assert not {run.info.run_id for run in left} & store.artifact_folders()
    assert not store.track(fingerprint).written


def test_a_killed_set_without_any_mark_is_replaced(store: Store) -> None:
    """What SIGKILL leaves: runs that still say RUNNING."""
    store.track("c0")
    experiment = store.client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    store.client.create_run(experiment.experiment_id, tags={"fingerprint": "c1", "variant": "bf16"})
    summary = store.track("c1")
    assert summary.replaced == 1
    assert len(store.runs("tags.fingerprint = 'c1'")) == len(SHAPES) + 1


def test_metrics_and_files_arrive(store: Store) -> None:
    summary = store.track("d1")
    run_id = summary.runs["awq"]
    history = store.client.get_metric_history(run_id, "load/ttft_p50_ms")
    measured = store.bundle.measurements["awq"]
    assert measured
    assert {(point.step, point.value) for point in history} == {
        (level.concurrency, level.ttft.p50_ms) for level in measured.levels
    }
    assert [point.step for point in history] == list(LEVELS)
    names = {item.path for item in store.client.list_artifacts(run_id)}
    assert {"measure.json", "requests.parquet", "gates.json", "flipped_items.json"} <= names
    top = {item.path for item in store.client.list_artifacts(summary.comparison_run_id)}
    assert {"report.html", "verdict.json", "verdict_table.json"} <= top


def test_filters_find_variants(store: Store) -> None:
    store.track("e1")
    only = "tags.fingerprint = 'e1' and "
    passed = store.runs(only + "tags.decision = 'GO' and tags.kind = 'variant'")
    assert [run.data.tags["variant"] for run in passed] == ["bf16-fp8kv"]
    quantized = store.runs(only + "params.weights = 'awq' and params.profile = 'demo'")
    assert {run.data.tags["variant"] for run in quantized} == {"awq", "awq-fp8kv"}
    fitting = store.runs(only + "metrics.capacity_fitting_sequences >= 24")
    assert {run.data.tags["variant"] for run in fitting} == {"bf16-fp8kv", "awq", "awq-fp8kv"}


def test_a_moved_repository_gets_artifacts_where_it_is_now(store: Store, tmp_path: Path) -> None:
    import shutil

    store.track("f1")
    moved = Store.__new__(Store)
    moved.folder, moved.bundle = tmp_path, store.bundle
    shutil.copytree(store.folder, tmp_path, dirs_exist_ok=True)
    moved.uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    moved.client = open_client(moved.uri)
    summary = moved.track("f1")
    assert summary.written
    assert summary.comparison_run_id in moved.artifact_folders()
    assert summary.comparison_run_id not in store.artifact_folders()


def test_an_unusable_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is not a database", encoding="utf-8")
    with pytest.raises(EnvironmentUnfitError, match=r"mlflow\.db.*not a database"):
        track(
            sample_results(),
            tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
            experiment=EXPERIMENT,
            fingerprint="0",
            artifacts={COMPARISON: {}},
        )


def test_a_file_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="sqlite"):
        open_client(tmp_path.as_uri())
