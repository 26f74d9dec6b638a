"""Reading a results folder back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import UserInputError
from pipeline.files import write_text
from pipeline.report import ResultBundle, load_bundle
from pipeline.results import save
from tests.support.sample_results import sample_results


def write_results(folder: Path, bundle: ResultBundle) -> None:
    """The files that the stages leave."""
    save(folder / "verdict.json", bundle.verdict)
    save(folder / "plan.json", bundle.plan)
    save(folder / "environment.json", bundle.environment)
    for name, measured in bundle.measurements.items():
        if measured:
            save(folder / "measure" / f"{name}.json", measured)
            rows = "".join(json.dumps(row) + "\n" for row in bundle.timelines[name])
            write_text(folder / "measure" / f"{name}.timeline.jsonl", rows)
    for name, quality in bundle.qualities.items():
        if quality:
            save(folder / "quality" / f"{name}.json", quality)
    for scheme, record in bundle.quantizations.items():
        save(folder / "quantize" / f"{scheme}.json", record)
    for stage, found in bundle.times.items():
        save(folder / "time" / f"{stage}.json", found)


@pytest.mark.parametrize("missing", [frozenset(), frozenset({"awq"})])
def test_a_folder_gives_back_what_was_written(tmp_path: Path, missing: frozenset[str]) -> None:
    bundle = sample_results(missing)
    write_results(tmp_path, bundle)
    assert load_bundle(tmp_path, bundle.facts) == bundle


def test_a_missing_verdict_names_the_file(tmp_path: Path) -> None:
    write_results(tmp_path, sample_results())
    (tmp_path / "verdict.json").unlink()
    with pytest.raises(UserInputError, match=r"verdict\.json"):
        load_bundle(tmp_path, {})


def test_a_cut_timeline_names_file_and_line(tmp_path: Path) -> None:
    write_results(tmp_path, sample_results())
    path = tmp_path / "measure" / "awq.timeline.jsonl"
    path.write_text('{"t_s": 1.0, "running": 1}\n{"t_s": 2.', encoding="utf-8")
    with pytest.raises(UserInputError, match=r"awq\.timeline\.jsonl, line 2"):
        load_bundle(tmp_path, {})


def test_the_reference_comes_first_whatever_the_order() -> None:
    bundle = sample_results()
    variants = dict(reversed(bundle.verdict.variants.items()))
    shuffled = ResultBundle(
        verdict=bundle.verdict.model_copy(update={"variants": variants}),
        plan=bundle.plan,
        measurements=bundle.measurements,
        qualities=bundle.qualities,
        quantizations=bundle.quantizations,
        environment=bundle.environment,
        timelines=bundle.timelines,
    )
    assert shuffled.variants == ["bf16", "bf16-again", "awq-fp8kv", "awq", "bf16-fp8kv"]
