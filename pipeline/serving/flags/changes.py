"""What became of flags that people still carry along from older set-ups. Each entry was read in vLLM's sources at both releases.

Flags that came, went or were renamed *within* the recorded releases are found by `vllm.tsv` alone; here they get their
replacement. Flags that went before the first recorded release are in no table, so they are here too.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Change:
    """One flag or variable that doesn't do any more what it did.

    `versions`: PEP 440 specifier of the releases for which this holds; `what` happened; `instead`: what to write now;
    `source`: file and releases in which it was read; `without_effect`: still parsed, but ignored.
    """

    name: str
    versions: str
    what: str
    instead: str
    source: str
    without_effect: bool = False

    def holds_for(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


SCALES = "KV scales come from the checkpoint (llm-compressor writes calibrated ones) or are 1.0, and are never computed at start-up"
ENGINE_ARGS = "vllm/engine/arg_utils.py"

CHANGES: tuple[Change, ...] = (
    Change(
        "--calculate-kv-scales", ">=0.28", "removed in 0.28", SCALES,
        f"{ENGINE_ARGS}: in 0.27.1 with a deprecation warning (config/cache.py), not in 0.28.0",
    ),
    Change(
        "--no-calculate-kv-scales", ">=0.28", "removed in 0.28", SCALES,
        f"{ENGINE_ARGS}: in 0.27.1, not in 0.28.0",
    ),
    Change(
        "--override-attention-dtype", ">=0.28", "removed in 0.28", "it only ever acted on AMD cards",
        "vllm/config/model.py 0.27.1 (warns off ROCm); not in 0.28.0",
    ),
    Change(
        "--max-num-partial-prefills", ">=0.27", "removed in 0.27",
        "--long-prefill-token-threshold limits what long prompts take of a step",
        "vllm/config/scheduler.py: in 0.26.0, not in 0.27.0",
    ),
    Change(
        "--max-long-partial-prefills", ">=0.27", "removed in 0.27",
        "--long-prefill-token-threshold limits what long prompts take of a step",
        "vllm/config/scheduler.py: in 0.26.0, not in 0.27.0",
    ),
    Change(
        "--enable-mamba-fine-grained-prefix-cache", ">=0.31", "renamed in 0.31",
        "write --enable-mamba-shared-prefix-checkpoint",
        "vllm/config/cache.py: the same field and docstring under the other name in 0.30.0 and 0.31.0",
    ),
    Change(
        "--enable-bf16x3-router-gemm", ">=0.30", "removed in 0.30", "the kernel is chosen by itself",
        "vllm/config/kernel.py: in 0.29.0, not in 0.30.0",
    ),
    Change(
        "--disable-cascade-attn", ">=0.32", "cascade attention is gone", "leave it out",
        f"{ENGINE_ARGS} 0.32.0, _DISABLE_CASCADE_ATTN_DEPRECATION_MESSAGE", without_effect=True,
    ),
    Change(
        "--no-disable-cascade-attn", ">=0.32", "cascade attention is gone", "leave it out",
        f"{ENGINE_ARGS} 0.32.0, _DISABLE_CASCADE_ATTN_DEPRECATION_MESSAGE", without_effect=True,
    ),
    Change(
        "--mamba-cache-mode", ">=0.33", "Mamba prefix caching follows --enable-prefix-caching", "leave it out",
        f"{ENGINE_ARGS} 0.33.0, _MAMBA_CACHE_MODE_DEPRECATION_MESSAGE", without_effect=True,
    ),
    # Gone before the first recorded release.
    Change(
        "--swap-space", ">=0.18", "removed by 0.18", "preempted requests are computed anew; there is no swap",
        f"{ENGINE_ARGS}: in 0.17.1, not in 0.18.1",
    ),
    Change(
        "--cuda-graph-sizes", ">=0.13", "renamed by 0.13", "write --cudagraph-capture-sizes",
        f"{ENGINE_ARGS}: both in 0.12.0, only the new one in 0.13.0",
    ),
    Change(
        "--max-seq-len-to-capture", ">=0.11", "removed by 0.11", "--max-cudagraph-capture-size limits the captured batch",
        f"{ENGINE_ARGS}: in 0.10.2, not in 0.11.2",
    ),
    Change(
        "--disable-log-requests", ">=0.17,<0.33", "removed by 0.17", "requests are only logged with --enable-log-requests",
        f"{ENGINE_ARGS}: deprecated in 0.16.0, not in 0.17.1; back in 0.33.0 as the opposite of --enable-log-requests",
    ),
    Change(
        "--task", ">=0.13", "removed by 0.13", "--runner and --convert say it",
        f"{ENGINE_ARGS}: deprecated in 0.12.0, not in 0.13.0",
    ),
    Change(
        "--rope-scaling", ">=0.11", "removed by 0.11", 'write --hf-overrides \'{"rope_parameters": ...}\'',
        f"{ENGINE_ARGS}: in 0.10.2, not in 0.11.2",
    ),
    Change(
        "--guided-decoding-backend", ">=0.12", "renamed by 0.12", "write --structured-outputs-config.backend",
        f"{ENGINE_ARGS}: in 0.11.2, not in 0.12.0",
    ),
    Change(
        "--num-lookahead-slots", ">=0.12", "removed by 0.12", "--speculative-config says it",
        f"{ENGINE_ARGS}: in 0.11.2, not in 0.12.0",
    ),
    Change(
        "--preemption-mode", ">=0.11", "removed by 0.11", "preempted requests are computed anew",
        f"{ENGINE_ARGS}: in 0.10.2, not in 0.11.2",
    ),
)  # fmt: skip

VARIABLES: tuple[Change, ...] = (
    Change(
        "VLLM_ATTENTION_BACKEND", ">=0.15", "it is read no more since 0.15", "a variant's engine_args take --attention-backend",
        "vllm/envs.py: in 0.14.1, not in 0.15.1",
    ),
)  # fmt: skip
