"""Compiles FlashInfer's modules, in the environment for a card: `python -m tests.support.flashinfer_build`, as an engine's start does.

A JSON request on stdin: {"modules": [names], "driver": library that stands in for the driver's where modules are loaded}; a JSON object of name -> figures in the last line of stdout: seconds that passed, CPU seconds,
the slowest file's, the largest compiler's memory in bytes, the module's file and the functions that it offers once it is loaded.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

KV = {"dtype_kv_bf16": "bfloat16", "dtype_kv_e4m3": "float8_e4m3fn"}
FUNCTIONS = ("plan", "paged_run", "ragged_run", "top_k_top_p_sampling_from_probs", "softmax")


def main() -> None:
    request = json.load(sys.stdin)
    print(json.dumps({name: _built(name, request["driver"]) for name in request["modules"]}))


def _spec(name: str) -> Any:
    """FlashInfer's own description of a module: heads of 128, BF16 queries and outputs."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module
    from flashinfer.jit.sampling import gen_sampling_module

    kv = next((getattr(torch, dtype) for part, dtype in KV.items() if part in name), None)
    bf16 = torch.bfloat16
    spec = (
        gen_sampling_module()
        if kv is None
        else _gen_batch_prefill_primary_module(
            "fa2", bf16, kv, bf16, torch.int32, 128, 128, 0, False, False, False
        )
    )
    assert spec.name == name, f"FlashInfer calls it {spec.name}"
    return spec


def _built(name: str, driver: str) -> dict[str, Any]:
    spec, before = _spec(name), resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    spec.build()
    wall = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spec.build()
    again = time.monotonic() - started - wall
    ctypes.CDLL(driver)
    module = spec.load()
    return {
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "again_s": again,
        "slowest_file_s": _slowest(spec.build_dir / ".ninja_log"),
        "compiler_bytes": used.ru_maxrss * 1024,
        "file": str(spec.get_library_path()),
        "functions": [function for function in FUNCTIONS if hasattr(module, function)],
    }


def _slowest(log: Path) -> float:
    """Of ninja's steps: its log has start and end in ms."""
    steps = [line.split("\t") for line in log.read_text().splitlines() if not line.startswith("#")]
    return max((int(step[1]) - int(step[0])) / 1000 for step in steps)


if __name__ == "__main__":
    main()
