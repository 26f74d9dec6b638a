"""Causes of failed starts: recordings of the real engine failing, and texts of machines that we don't have."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.environments.toolkit import NO_C_COMPILER, NO_CXX, NO_NINJA, NO_NVCC, NO_PYTHON_H
from pipeline.serving.failures import failure_cause

RECORDED = Path(__file__).resolve().parents[2] / "contract" / "recorded"

RECORDED_CAUSES = {
    "0.32-cpu-avx2-awq-first-request": "the engine lacks the kernel cpu_gemm_wna16 on this machine",
    "0.32-cpu-avx2-fp8kv": "this CPU can't hold an FP8 KV cache with the stock kernels (FP8 KV cache on CPU requires x86 with AVX-512 or "
    "AMX)",
    "0.32-cpu-bad-option": "the engine refuses its options: argument --kv-cache-dtype: invalid choice: 'fp7'",
    "0.32-cpu-core-killed": "its engine core process ended without a word, which is what being killed for want of memory looks like",
    "0.32-cpu-kv-more-than-memory": "the machine has 14.72 of 16.71 GiB of memory free and the KV cache asks for 200.0 GiB",
    "0.32-cpu-max-model-len": "a maximum length of 100000 tokens is more than the model's own 8192",
    "0.32-cpu-no-room": "not even one request fits into the 0.01 GiB of KV cache; a maximum length of 128 tokens would fit",
    "0.32-cpu-no-tokenizer": "the model's folder holds no tokenizer that it can read",
    "0.32-cpu-port-in-use": "its port is already in use",
    "0.32-cpu-unknown-architecture": "this engine doesn't know the architecture GrokForCausalLM9",
    "0.32-cpu-unknown-model-type": "this engine doesn't know the model type grok9",
    "0.32-cpu-worker-killed": "its worker process: it was killed by signal 9 (SIGKILL), which is what a machine without free memory does",
    # Cards that aren't at hand, written after public logs and the releases' own texts: the first lines of each say which.
    "0.32-cuda-oom-at-load": "the card has no room for the weights: more cards (server.tensor_parallel) or smaller weights",
    "0.32-cuda-oom-at-profiling": "the card ran out of memory in its largest step, asking for 4.64 GiB more: lower "
    "server.max_num_batched_tokens",
    "0.32-cuda-oom-at-graph-capture": "the card ran out of memory capturing CUDA graphs, asking for 96.00 MiB more: lower "
    "device.memory_utilization",
    "0.15-rtx4090-oom-at-sampler": "the card ran out of memory warming up the sampler for 256 requests: lower "
    "server.max_num_seqs or device.memory_utilization",
    "0.2x-rtx3090-no-room": "not even one request fits: it needs 3.05 GiB of KV cache and 2.17 GiB are there; a maximum length "
    "of 111456 tokens would fit",
    "0.32-cuda-no-backend": "no attention backend of this card keeps a fp8_ds_mla KV cache (FLASH_ATTN: kv_cache_dtype not "
    "supported, FP8 KV cache requires FA3 on SM90, FA4 with head_size=512 on SM90, or FA4 on SM100; FLASHINFER, TRITON_ATTN, "
    "FLEX_ATTENTION, TURBOQUANT: kv_cache_dtype not supported)",
    "0.32-cuda-pinned-backend": "the pinned attention backend FLASH_ATTN can't serve this: kv_cache_dtype not supported, FP8 KV "
    "cache requires FA3 on SM90, FA4 with head_size=512 on SM90, or FA4 on SM100",
    "0.32-cuda-memory-taken": "the card has only 21.43 of 23.64 GiB free, less than the memory utilization asks for",
    "0.32-cuda-memory-freed": "the card's free memory grew from 17.92 to 18.31 GiB while the engine measured its own: nothing "
    "else may use the card during a start",
    "0.32-cuda-nccl": "NCCL, which joins the cards, failed: unhandled cuda error (NCCL_DEBUG=INFO says more)",
    "0.32-cuda-driver-too-old": "the NVIDIA driver is too old for this engine: it runs CUDA 12.2 at most",
    "0.32-cuda-no-kernel-image": "this build of the engine has no kernels for the card's architecture",
    "0.32-cuda-no-card": "the engine finds no card that it can use",
    "0.32-missing-weights": "there are no weights in …/weights/awq",
    "0.32-missing-shard": "the checkpoint's file …/weights/bf16/model-00002-of-00004.safetensors is missing",
    "0.32-damaged-weights": "a file of the weights is cut off or damaged (incomplete metadata, file not fully covered)",
}


@pytest.mark.parametrize(("name", "expected"), RECORDED_CAUSES.items())
def test_recorded_failures(name: str, expected: str) -> None:
    text = (RECORDED / f"failed-{name}.txt").read_text(encoding="utf-8")
    assert failure_cause(text, 1) == expected


def test_every_recorded_failure_is_tested() -> None:
    found = {path.stem.removeprefix("failed-") for path in RECORDED.glob("failed-*.txt")}
    assert found == set(RECORDED_CAUSES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # PyTorch's CUDA caching allocator
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB",
            "the card ran out of memory asking for 2.00 GiB more",
        ),
        # v1/core/kv_cache_utils.py, 0.19 and 0.32
        (
            "ValueError: To serve at least one request with the models's max seq len (131072), (7.00 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (5.16 GiB). Based on the available memory, the estimated maximum "
            "model length is 96608. Try increasing `gpu_memory_utilization`",
            "not even one request fits: it needs 7.00 GiB of KV cache and 5.16 GiB are there; a maximum length of 96608 tokens "
            "would fit",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "no memory is left for the KV cache after weights and activations",
        ),
        # v1/worker/utils.py, 0.32
        (
            "ValueError: Free memory on device cuda:0 (20.31/23.64 GiB) on startup is less than desired GPU memory utilization "
            "(0.92, 21.75 GiB).",
            "the card has only 20.31 of 23.64 GiB free, less than the memory utilization asks for",
        ),
        # v1/attention/backends/cpu_attn.py, 0.32
        (
            "ValueError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
            "this CPU can't hold an FP8 KV cache with the stock kernels (FP8 KV cache on CPU requires x86 with AVX-512 or AMX)",
        ),
        (
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'",
            "the engine lacks the kernel cpu_gemm_wna16 on this machine",
        ),
        # flashinfer 0.7.0, jit/cpp_ext.py: get_cuda_path, run_ninja (seen with the real one in tests/contract/test_flashinfer.py)
        ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", NO_NVCC),
        ("RuntimeError: Ninja build failed. Ninja output:\n/bin/sh: 1: /e/cuda/bin/nvcc: not found", NO_NVCC),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", NO_NINJA),
        # nvcc 13.0 without g++, and its crt/host_config.h
        ("nvcc fatal   : Failed to preprocess host compiler properties.", NO_CXX),
        ("/bin/sh: 1: c++: not found", NO_CXX),
        (
            "host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!",
            "the C++ compiler is newer than the environment's nvcc knows: set CC and CXX to version 15 (apt: g++-15)",
        ),
        # triton 3.7.1, runtime/build.py and backends/nvidia/driver.py
        (
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
            NO_C_COMPILER,
        ),
        ("/tmp/x/cuda_utils.c:7:10: fatal error: Python.h: No such file or directory", NO_PYTHON_H),
        (
            "AssertionError: libcuda.so cannot found!\nPlease make sure GPU is set up",
            "the driver's libcuda.so.1 isn't where the linker looks: run ldconfig, or put its folder into LD_LIBRARY_PATH",
        ),
        ("OSError: [Errno 98] Address already in use", "its port is already in use"),
        ("ModuleNotFoundError: No module named 'vllm'", "the serve environment lacks the module vllm"),
        (
            "(EngineCore pid=1) ERROR [core.py:1] RuntimeError: a new problem\n"
            "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "RuntimeError: a new problem",
        ),
    ],
)
def test_causes(text: str, expected: str) -> None:
    assert failure_cause(f"INFO something before\n{text}\nINFO something after", 1) == expected


@pytest.mark.parametrize(
    ("returncode", "expected"),
    [
        (3, "it ended with exit code 3 and its log names no cause"),
        (-9, "it was killed by signal 9 (SIGKILL), which is what a machine without free memory does"),
        (-11, "it was killed by signal 11 (SIGSEGV)"),
        (None, "it gave no answer and its log names no cause"),
    ],
)
def test_silent_log(returncode: int | None, expected: str) -> None:
    assert failure_cause("INFO all is well", returncode) == expected


def test_a_warning_that_quotes_an_error_is_not_a_cause() -> None:
    text = "(APIServer pid=2) WARNING [system_utils.py:255] ... This can cause fd limit errors like `OSError: [Errno 24] Too many`"
    assert failure_cause(text, 2) == "it ended with exit code 2 and its log names no cause"


def test_a_cause_is_one_line_of_bounded_length() -> None:
    cause = failure_cause("ValueError: " + "long " * 1000 + "\nmore", 1)
    assert "\n" not in cause
    assert len(cause) <= 300


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.glob("log-*.txt")))
def test_a_healthy_log_names_no_cause(name: str) -> None:
    text = (RECORDED / name).read_text(encoding="utf-8")
    assert failure_cause(text, None) == "it gave no answer and its log names no cause"
