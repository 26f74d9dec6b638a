"""The command line against the real parser of the engine that is locked: a renamed flag fails here, not at a start-up."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.serving.command import ServeSpec, build_command, build_environment
from tests.support.environments import environment_python

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
results = [vars(make_arg_parser(FlexibleArgumentParser()).parse_args(argv)) for argv in json.loads(sys.argv[1])]
print("PARSED" + json.dumps(results, default=repr))
"""
SPECS = {
    "cpu": ServeSpec(
        model_dir=Path("/models/some"),
        served_name="awq-fp8kv",
        target="cpu",
        max_model_len=512,
        max_num_seqs=60,
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=83_886_080,
        max_num_batched_tokens=1024,
        block_size=128,
        seed=7,
    ),
    "cuda": ServeSpec(
        model_dir=Path("/models/some"),
        served_name="bf16",
        target="cuda",
        max_model_len=8192,
        max_num_seqs=128,
        kv_cache_dtype="bfloat16",
        gpu_memory_utilization=0.92,
        tensor_parallel=2,
        pipeline_parallel=2,
        enforce_eager=False,
        prefix_caching=True,
        extra_args=("--attention-backend", "FLASHINFER"),
    ),
}


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, object]]:
    """Both specs as the engine understands them; one start of its environment for all tests."""
    python = environment_python("serve")
    argv = [build_command(spec, python, 8123)[3:] for spec in SPECS.values()]
    # Parsed as on a CPU, which is the machine that runs this test; the flags are the same.
    environment = build_environment(SPECS["cpu"], {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]})
    done = subprocess.run(
        [python, "-c", PARSE, json.dumps(argv)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("PARSED"))
    return dict(zip(SPECS, json.loads(line.removeprefix("PARSED")), strict=True))


@pytest.mark.parametrize("target", SPECS)
def test_every_field_arrives(parsed: dict[str, dict[str, object]], target: str) -> None:
    spec, got = SPECS[target], parsed[target]
    same_name = (
        "dtype",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_seqs",
        "enforce_eager",
        "seed",
        "kv_cache_memory_bytes",
    )
    for name in same_name:
        assert got[name] == getattr(spec, name), name
    assert got["model"] == "/models/some"
    assert got["served_model_name"] == [spec.served_name]
    assert (got["host"], got["port"]) == ("127.0.0.1", 8123)
    assert got["enable_prefix_caching"] is spec.prefix_caching
    assert got["quantization"] is None
    assert got["generation_config"] == "vllm"
    assert got["disable_uvicorn_access_log"] is True


def test_optional_fields_arrive(parsed: dict[str, dict[str, object]]) -> None:
    assert parsed["cpu"]["max_num_batched_tokens"] == 1024
    assert parsed["cpu"]["block_size"] == 128
    assert parsed["cuda"]["gpu_memory_utilization"] == 0.92
    assert "FLASHINFER" in str(parsed["cuda"]["attention_backend"])
    assert parsed["cuda"]["max_num_batched_tokens"] is None
    assert (parsed["cuda"]["tensor_parallel_size"], parsed["cuda"]["pipeline_parallel_size"]) == (2, 2)
    assert (parsed["cpu"]["tensor_parallel_size"], parsed["cpu"]["pipeline_parallel_size"]) == (1, 1)
