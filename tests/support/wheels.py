"""Single packages for tests, without an environment: fetched once and unpacked into our cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.environments import unpack
from pipeline.files import cache_folder


def unpacked(name: str, requirements: Sequence[str]) -> Path:
    """The folder `name` with these packages and none that they ask for, fetched where it isn't there yet."""
    folder = cache_folder("test-packages", name)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        content = Path(scratch) / "content"
        unpack(requirements, content)
        try:
            os.replace(content, folder)
        except OSError:  # another run was faster
            shutil.rmtree(content)
    return folder
