"""Where vLLM finds the plugin. Safe in every environment: imports nothing of vLLM or PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ENTRY_POINT = Path(__file__).resolve().parent / "entry_point"


def plugin_pythonpath() -> str:
    """What goes on a vLLM process's PYTHONPATH: the folder of `pipeline`, and the one whose metadata names the entry point.

    Two entries joined by `os.pathsep`, absolute.
    """
    return os.pathsep.join([str(ROOT), str(ENTRY_POINT)])
