"""Plots take most of a page's time; tests that ask for words only go without."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots out of every page."""
    monkeypatch.setattr("pipeline.report.plots.plots_of", lambda *_: [])
