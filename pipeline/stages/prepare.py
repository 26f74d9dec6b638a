"""Stage `prepare`: put the reference model at `artifacts/weights/bf16`, checked and readable in every environment."""

from __future__ import annotations

import sys

from pipeline.files import write_json
from pipeline.models.prepare import prepare
from pipeline.settings import Settings
from pipeline.stages.context import LOGS, RESULTS, WEIGHTS, python_of, stage_main


def run(settings: Settings, _: str) -> None:
    record = prepare(
        settings.model.source,
        WEIGHTS / "bf16",
        python_of(settings, "serve"),
        name=settings.model.name,
        log_path=LOGS / "prepare.log",
    )
    write_json(RESULTS / "prepare.json", record)
    print(
        f"{record['name']}: {record['parameters']:,} parameters, {record['weight_bytes'] / 1024**2:.1f} MiB"
    )


if __name__ == "__main__":
    sys.exit(stage_main(run))
