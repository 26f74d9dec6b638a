"""Interpreters of the project's environments, for tests that run code in another one."""

from __future__ import annotations

from pathlib import Path

from pipeline.environments import interpreter


def environment_python(name: str) -> Path:
    """The Python of environment `name` ("serve", "autoawq"), building the environment if it isn't there."""
    return interpreter(name)
