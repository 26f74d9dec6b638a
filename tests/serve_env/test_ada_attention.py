"""Which attention an Ada card gets, from the installed vLLM's own code: what `awq-pinned` is pinned to, and what carries FP8 KV.

There is no card here and the modules that hold the choice need one to be imported, so single functions are taken out of them and
run with the card's compute capability.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

ROOT = Path(__file__).resolve().parents[2]
ADA = DeviceCapability(8, 9)


def source(module: str) -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / module).read_text()


def function(module: str, name: str, **names: Any) -> Any:
    """A function or class method of a module that can't be imported here, without its decorators."""
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list, node.returns = [], None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            space: dict[str, Any] = dict(names)
            exec(compile(ast.Module([node], []), module, "exec"), space)
            return space[name]
    raise AssertionError(f"{module} has no {name}")


def variant(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"conf/variant/{name}.yaml").read_text())


def flash_attention_refuses(kv_cache_dtype: str) -> str | None:
    """FlashAttention's own answer for a head of 128 on Ada, whatever version it would take there."""
    platform = SimpleNamespace(
        is_xpu=lambda: False, is_device_capability_family=lambda family: family // 10 == ADA.major
    )
    for version in (2, 3, 4):
        supports = function(
            "v1/attention/backends/fa_utils.py", "flash_attn_supports_kv_cache_dtype",
            current_platform=platform, get_flash_attn_version=lambda version=version, **_: version,
        )  # fmt: skip
        combination = function(
            "v1/attention/backends/flash_attn.py", "supports_combination",
            DeviceCapability=DeviceCapability, is_quantized_kv_cache=is_quantized_kv_cache,
            flash_attn_supports_kv_cache_dtype=supports,
        )  # fmt: skip
        why = combination(None, 128, None, kv_cache_dtype, 16, False, False, False, False, ADA)
        if why is None:
            return None
    return why


def test_the_pinned_backend_is_the_one_that_fp8_takes_on_ada() -> None:
    order = function(
        "platforms/cuda.py", "_get_backend_priorities", AttentionBackendEnum=AttentionBackendEnum
    )(False, ADA)
    assert [backend.name for backend in order[:3]] == ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
    assert flash_attention_refuses("bfloat16") is None
    assert "FA3" in (flash_attention_refuses("fp8") or "")
    capable = function(
        "v1/attention/backends/flashinfer.py",
        "supports_compute_capability",
        DeviceCapability=DeviceCapability,
    )
    assert capable(None, ADA)
    pinned = variant("awq-pinned")["engine_args"]
    assert pinned == ["--attention-backend", "FLASHINFER"]
    assert AttentionBackendEnum[pinned[1]] is order[1]


def test_only_triton_carries_scales_per_token_and_head() -> None:
    dtype = variant("awq-kv-per-token-head")["kv_cache_dtype"]
    assert dtype in TritonAttentionBackend.supported_kv_cache_dtypes
    assert TritonAttentionBackend.supports_compute_capability(ADA)
    for other in ("flash_attn", "flashinfer"):
        assert f'"{dtype}"' not in source(f"v1/attention/backends/{other}.py")
