"""The engine's own environment variables (`VLLM_*`): a number may not hang on one that no file names.

The settings name some (`server.environment`): those are passed on and stand in every result's provenance. Of the inherited ones
those are taken out that would move the server or its log away from us, and those pass that decide no number (folders, timeouts,
an image's labels). Any other is refused. Names: vllm/envs.py of 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.errors import UserInputError
from pipeline.serving.flags import check_environment

PREFIX = "VLLM_"
REMOVED = frozenset(
    {
        "VLLM_API_KEY",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_CPU_KVCACHE_SPACE",  # whole GiB only, and it silently wins over --kv-cache-memory-bytes
        "VLLM_LOGGING_COLOR",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_PLUGINS",
        "VLLM_PORT",
    }
)
OURS = frozenset(
    {
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENGINE_READY_TIMEOUT_S",  # 600 by itself, which would undercut server.startup_timeout_s
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_TARGET_DEVICE",
    }
)
HARMLESS = frozenset(
    {
        "VLLM_ASSETS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_MEDIA_CACHE", "VLLM_RPC_BASE_PATH",
        "VLLM_CUDART_SO_PATH", "VLLM_CUDA_COMPATIBILITY_PATH", "VLLM_ENABLE_CUDA_COMPATIBILITY", "VLLM_NCCL_INCLUDE_PATH",
        "VLLM_NCCL_SO_PATH", "VLLM_HOST_IP", "VLLM_LOOPBACK_IP",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "VLLM_DO_NOT_TRACK", "VLLM_USAGE_SOURCE", "VLLM_USAGE_STATS_SERVER",
        "VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE", "VLLM_BUILD_URL", "VLLM_DOCKER_BUILD_CONTEXT", "VLLM_IMAGE_TAG",
        "VLLM_MAIN_CUDA_VERSION",
    }
)  # fmt: skip


def check_named(variables: Mapping[str, str], version: str) -> None:
    """Refuse (`UserInputError`) what the settings may not name: other programs' variables, ours, and what `version` ignores."""
    for name in variables:
        if not name.startswith(PREFIX):
            raise UserInputError(f"environment: {name} isn't a variable of vLLM's; it names {PREFIX}* only")
        if name in REMOVED | OURS:
            raise UserInputError(
                f"environment: {name} can't be set here: how the server is started decides it"
            )
    check_environment(variables, version)


def check_inherited(names: Iterable[str], named: Mapping[str, str], version: str) -> None:
    """Refuse (`UserInputError`) inherited variables that may change a number and stand in no file."""
    left = {name for name in names if name.startswith(PREFIX)} - REMOVED - OURS - HARMLESS - set(named)
    check_environment(dict.fromkeys(left, ""), version)
    if left:
        raise UserInputError(
            f"the environment has {', '.join(sorted(left))}, which may change what the engine does and stands in no result: "
            "unset it, or name it with its value under `environment:` in conf/server/"
        )
