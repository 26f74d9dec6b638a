"""How the fields of a `ServeSpec` are said to the engine, by version.

The flags and the values that they take are checked against `vllm.tsv` for every recorded release (tests/unit/serving), and
against the installed engine's own parser (tests/contract/test_serving_flags.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Option:
    """One field's flag in a range of releases.

    `off`: what False says, nothing without it. `unsaid`: the value that needs no flag, because every release has it as its
    default. `versions`: PEP 440 specifier, '' for all recorded releases. `key`: where a user sets it.
    """

    field: str
    flag: str
    key: str
    off: str | None = None
    unsaid: object = None
    versions: str = ""

    def holds_for(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def words(self, value: object) -> list[str]:
        """The arguments that say `value`."""
        if value is None or value == self.unsaid:
            return []
        if isinstance(value, bool):
            return [self.flag] if value else [self.off] if self.off else []
        return [self.flag, str(value)]


OPTIONS: tuple[Option, ...] = (
    Option("model", "--model", "the variant's weights"),
    Option("served_name", "--served-model-name", "the variant's name"),
    Option("host", "--host", "nobody: the server always binds 127.0.0.1"),
    Option("port", "--port", "the launcher"),
    # A line per request would be most of the log; since 0.33 the opposite is --enable-uvicorn-access-log.
    Option("quiet", "--disable-uvicorn-access-log", "nobody: requests aren't logged"),
    Option("dtype", "--dtype", "server.dtype"),
    # 'auto' (the default) turns into FP8 by itself when the checkpoint has KV scales.
    Option("kv_cache_dtype", "--kv-cache-dtype", "the variant's kv_cache_dtype"),
    Option("max_model_len", "--max-model-len", "server.max_model_len"),
    Option("max_num_seqs", "--max-num-seqs", "server.max_num_seqs"),
    Option("seed", "--seed", "server.seed"),
    # 'auto' (the default) applies the checkpoint's own sampling defaults; Qwen2.5 ships a repetition penalty.
    Option("generation_config", "--generation-config", "nobody: sampling is each request's own"),
    # On by default since 0.11 for models that generate. --no-enable-x is hidden from the help since 0.33, but still there.
    Option("prefix_caching", "--enable-prefix-caching", "the stage: on under load, off for scoring", "--no-enable-prefix-caching", versions="<0.33"),
    Option("prefix_caching", "--enable-prefix-caching", "the stage: on under load, off for scoring", "--disable-prefix-caching", versions=">=0.33"),
    Option("enforce_eager", "--enforce-eager", "server.enforce_eager"),
    Option("kv_cache_memory_bytes", "--kv-cache-memory-bytes", "device.memory_gib"),
    # Default 0.92 (0.9 before 0.20, vllm/config/cache.py). 0.31 added the alias --device-memory-utilization.
    Option("gpu_memory_utilization", "--gpu-memory-utilization", "device.memory_utilization"),
    Option("max_num_batched_tokens", "--max-num-batched-tokens", "server.max_num_batched_tokens"),
    Option("block_size", "--block-size", "server.block_size"),
    Option("tensor_parallel", "--tensor-parallel-size", "server.tensor_parallel", unsaid=1),
    Option("pipeline_parallel", "--pipeline-parallel-size", "server.pipeline_parallel", unsaid=1),
)  # fmt: skip

# Other spellings of the flags above, all releases.
ALIASES = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--no-enforce-eager": "--enforce-eager",
    "--no-enable-prefix-caching": "--enable-prefix-caching",
    "--disable-prefix-caching": "--enable-prefix-caching",
    "--no-disable-uvicorn-access-log": "--disable-uvicorn-access-log",
    "--enable-uvicorn-access-log": "--disable-uvicorn-access-log",
}


def arguments(values: Mapping[str, object], version: str) -> list[str]:
    """The command line's arguments for `values` (field to value) in `version`'s words."""
    said = []
    for option in OPTIONS:
        if option.holds_for(version):
            said += option.words(values[option.field])
    return said


def option_of(flag: str) -> Option | None:
    """The option that a flag in any spelling belongs to, None when no field of ours stands behind it."""
    name = ALIASES.get(flag, flag)
    return next((option for option in OPTIONS if option.flag == name), None)
