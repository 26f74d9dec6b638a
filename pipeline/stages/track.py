"""Stage `track`: rebuild the MLflow runs from the result files."""

from __future__ import annotations

import sys

from pipeline.files import write_json
from pipeline.runs import RUNS
from pipeline.settings import Settings
from pipeline.stages.context import RESULTS, bundle, stage_main
from pipeline.tracking import TRACKING_URI, lock_fingerprint, result_artifacts, track


def run(settings: Settings, _: str) -> None:
    found = bundle(settings)
    summary = track(
        found,
        tracking_uri=TRACKING_URI,
        experiment=f"quantgate {settings.profile}",
        fingerprint=lock_fingerprint(RUNS / settings.profile / "dvc.lock"),
        artifacts=result_artifacts(RESULTS, found),
    )
    write_json(RESULTS / "tracking.json", summary.as_json())
    print(
        f"MLflow: {'wrote' if summary.written else 'already had'} {len(summary.runs)} variant runs and their comparison"
    )


if __name__ == "__main__":
    sys.exit(stage_main(run))
