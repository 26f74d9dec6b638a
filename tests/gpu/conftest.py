"""What only a card can show. Without one these tests are collected and listed as not run: each names what stays unproven."""

from __future__ import annotations

import pytest

from pipeline.gpu import read_gpus, visible
from pipeline.results import Gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The only skip in the project: its reason is the claim that the test would prove, its docstring's first sentence."""
    ours = [item for item in items if item.get_closest_marker("gpu")]
    if not ours or visible(read_gpus()):
        return
    for item in ours:
        claim = (item.obj.__doc__ or "").strip().split("\n")[0].rstrip(".")
        case = item.name[item.name.index("[") :] if "[" in item.name else ""
        item.add_marker(
            pytest.mark.skip(reason=f"no card, so not proven: {claim}{' ' if case else ''}{case}")
        )


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The card that an engine would get."""
    return visible(read_gpus())[0]
