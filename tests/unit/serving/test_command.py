"""The command line and the environment of a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserInputError
from pipeline.serving.command import ServeSpec, build_command, build_environment


def spec(**changes: Any) -> ServeSpec:
    values: dict[str, Any] = {
        "engine_version": "0.32.0",
        "model_dir": Path("some/model"),
        "served_name": "bf16",
        "target": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 60,
        "kv_cache_memory_bytes": 2**26,
    }
    return ServeSpec(**{**values, **changes})


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_bf16_cache_is_said_explicitly() -> None:
    """Else a checkpoint with KV scales turns 'auto' into FP8 without a word."""
    assert value_of(build_command(spec(), "python", 1), "--kv-cache-dtype") == "bfloat16"


def test_binds_the_loopback_only_and_never_names_a_quantization() -> None:
    command = build_command(spec(), "python", 8123)
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "8123"
    assert not any(part.startswith(("--quantization", "-q")) for part in command)


def test_unset_options_stay_the_engines_own() -> None:
    command = build_command(spec(), "python", 1)
    assert not {"--gpu-memory-utilization", "--max-num-batched-tokens", "--block-size"} & set(command)
    assert value_of(command, "--kv-cache-memory-bytes") == str(2**26)


def test_extra_arguments_come_last_so_that_they_win() -> None:
    command = build_command(spec(extra_args=("--attention-backend", "FLASHINFER")), "python", 1)
    assert command[-2:] == ["--attention-backend", "FLASHINFER"]


def test_local_folder_becomes_absolute_and_a_hub_id_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some/model").mkdir(parents=True)
    assert value_of(build_command(spec(), "python", 1), "--model") == str(tmp_path / "some/model")
    hub = spec(model_dir=Path("Qwen/Qwen2.5-7B-Instruct"))
    assert value_of(build_command(hub, "python", 1), "--model") == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_dtype": "fp7"},
            "--kv-cache-dtype 'fp7' isn't known to vLLM 0.32.0; allowed are auto, bfloat16",
        ),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "Triton attention, which a CPU doesn't have"),
        ({"kv_cache_memory_bytes": None}, "needs kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 0.9}, "no meaning on a CPU"),
        ({"extra_args": ("--quantization", "awq")}, "'--quantization' can't be set here: .*slower kernel"),
        ({"extra_args": ("--port=80",)}, "'--port=80' can't be set here"),
        ({"extra_args": ("--host", "0.0.0.0")}, "always binds 127.0.0.1"),
        (
            {"extra_args": ("--max_model_len=4096",)},
            "'--max_model_len=4096' can't be set here: .* server.max_model_len",
        ),
        ({"extra_args": ("--kv-cache-dtype", "fp8")}, "set by the variant's kv_cache_dtype"),
        (
            {"extra_args": ("--calculate-kv-scales",)},
            "bf16: engine_args: --calculate-kv-scales isn't a flag of vLLM 0.32.0",
        ),
        ({"environment": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS isn't a variable of vLLM's"),
        ({"environment": {"VLLM_PORT": "1"}}, "VLLM_PORT can't be set here"),
        ({"environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}, "which vLLM 0.32.0 ignores"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        spec(**changes)


def test_environment_is_offline_and_decides_the_pool_by_bytes() -> None:
    inherited = {
        "PATH": "/bin",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "0-31",
        "PYTHONHOME": "/x",
    }
    environment = build_environment(spec(), inherited)
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_TARGET_DEVICE"] == "cpu"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert build_environment(spec(), {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"VLLM_CPU_KVCACHE_SPACE", "PYTHONHOME"} & set(environment)
    assert inherited["VLLM_CPU_KVCACHE_SPACE"] == "4", "the caller's own environment isn't touched"


def test_a_cpus_engine_starts_lean_unless_somebody_says_otherwise() -> None:
    """One process, no compilation beside eager mode, an allocator that keeps its memory."""
    lean = build_environment(spec(), {})
    assert (lean["VLLM_ENABLE_V1_MULTIPROCESSING"], lean["TORCHDYNAMO_DISABLE"]) == ("0", "1")
    assert int(lean["MALLOC_TRIM_THRESHOLD_"]) > 2**30
    assert lean["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    usual = build_environment(spec(environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}), {})
    assert usual["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in usual
    named = build_environment(spec(environment={"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}), {})
    assert named["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "TORCHDYNAMO_DISABLE" not in build_environment(spec(enforce_eager=False), {})
    cuda = build_environment(spec(target="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.92), {})
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD", "TORCHDYNAMO_DISABLE"}
    assert not ours & set(cuda)


def test_environment_finds_the_plugin_before_anything_inherited() -> None:
    repository = str(Path(__file__).resolve().parents[3])
    paths = build_environment(spec(), {"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(os.pathsep)
    assert repository in paths
    assert paths[-1] == "/theirs"


def test_cuda_environment_leaves_the_platform_alone() -> None:
    cuda = spec(target="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.92)
    environment = build_environment(cuda, {})
    assert not {"VLLM_TARGET_DEVICE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_WAIT_POLICY"} & set(environment)
    assert "VLLM_TARGET_DEVICE" not in build_environment(cuda, {"VLLM_TARGET_DEVICE": "cpu"})


def test_a_variable_that_may_change_a_number_is_named_or_refused() -> None:
    inherited = {
        "VLLM_USE_TRITON_AWQ": "1",
        "VLLM_IMAGE_TAG": "v0.32.0",
        "VLLM_API_KEY": "s",
        "VLLM_LOGGING_COLOR": "1",
    }
    with pytest.raises(UserInputError, match=r"has VLLM_USE_TRITON_AWQ, which may change .* in conf/server/"):
        build_environment(spec(), inherited)
    found = build_environment(spec(environment={"VLLM_USE_TRITON_AWQ": "0"}), inherited)
    assert (found["VLLM_USE_TRITON_AWQ"], found["VLLM_IMAGE_TAG"]) == ("0", "v0.32.0")
    assert not {"VLLM_API_KEY", "VLLM_LOGGING_COLOR"} & set(found)
