"""MLflow: one run per variant and one comparison run above them, rebuilt from the result files.

`track` is idempotent: a run set is known by the fingerprint of the results, a complete one is left alone and an
interrupted one is replaced. mlflow is imported when something is tracked, not when this package is.
"""

from __future__ import annotations

from pipeline.tracking.fingerprint import lock_fingerprint
from pipeline.tracking.server import server_command
from pipeline.tracking.store import ARTIFACT_ROOT, TRACKING_URI
from pipeline.tracking.track import COMPARISON, TrackSummary, result_artifacts, track

__all__ = [
    "ARTIFACT_ROOT",
    "COMPARISON",
    "TRACKING_URI",
    "TrackSummary",
    "lock_fingerprint",
    "result_artifacts",
    "server_command",
    "track",
]
