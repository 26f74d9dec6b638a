"""Property tests are the same on every run and machine: no deadline, no luck of the draw, nothing kept from the run before."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any-machine",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-machine")
