"""Kept answers: belong to one identity, survive a kill, and are never believed when the file isn't what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import EnvironmentUnfitError
from pipeline.quality.cache import RequestCache

AWQ = {"variant": "awq", "checkpoint": "c"}


def test_an_answer_is_kept_for_its_request_and_its_identity(tmp_path: Path) -> None:
    first = RequestCache(tmp_path, AWQ)
    first.put({"prompt": [1, 2]}, [[-1.5, True]])
    assert first.get({"prompt": [1, 2]}) == [[-1.5, True]] and first.get({"prompt": [1, 3]}) is None
    first.close(finished=False)
    again = RequestCache(tmp_path, dict(reversed(AWQ.items())))
    assert again.get({"prompt": [1, 2]}) == [[-1.5, True]]
    other = RequestCache(tmp_path, AWQ | {"variant": "bf16"})
    assert other.get({"prompt": [1, 2]}) is None
    again.close(finished=True)
    other.close(finished=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_under_another_variants_name_is_refused(tmp_path: Path) -> None:
    awq = RequestCache(tmp_path, AWQ)
    awq.put({"prompt": [1]}, 1)
    awq.close(finished=False)
    bf16 = RequestCache(tmp_path, AWQ | {"variant": "bf16"})
    bf16.close(finished=True)
    awq.path.rename(bf16.path)
    with pytest.raises(EnvironmentUnfitError, match="another variant's answers"):
        RequestCache(tmp_path, AWQ | {"variant": "bf16"})


def test_a_cut_file_is_begun_anew(tmp_path: Path) -> None:
    cache = RequestCache(tmp_path, AWQ)
    cache.close(finished=False)
    cache.path.write_bytes(b"not a database, " * 300)
    again = RequestCache(tmp_path, AWQ)
    assert again.get({"prompt": [1]}) is None
    again.close(finished=True)
