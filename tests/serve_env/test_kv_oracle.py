"""The planner's blocks against vLLM's own: its model config, its cache specs, its grouping, its sizing, called in process.

For every kind of layer the engine is asked how many blocks, tokens and sequences a number of bytes makes, and the planner must
say the same to the block. What a log would say is `get_kv_cache_capacity`; what is asked is never more than the public
config.json of a model, written to a folder without weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from pipeline.capacity import EngineRules, Geometry, KvPool, kv_layout
from tests.support.geometries import ALL as CONFIGS

GIB = 1024**3
LENGTH = 4096
BUDGETS = (3 * GIB, 7 * GIB + 12_345_678)


class Engine:
    """One model's configuration as the engine makes it, without weights."""

    def __init__(self, folder: Path, config: dict[str, Any], block_size: int = 32) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=LENGTH,
            block_size=block_size,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        self.config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._block_size = block_size
        self.use("bfloat16", 1)

    def use(self, dtype: str, tensor_parallel: int = 1, length: int = LENGTH) -> Engine:
        """The same model with another cache, number of ranks or length; no process is started, so ranks only divide."""
        self._dtype = dtype
        self.config.parallel_config.tensor_parallel_size = tensor_parallel
        self.config.model_config.max_model_len = length
        cache = self.config.cache_config
        cache.kv_cache_layout, cache.block_size, cache.cache_dtype = "LBHNC", self._block_size, "auto"
        cache.mamba_page_size_padded = None
        return self

    @property
    def rules(self) -> EngineRules:
        """The engine's own defaults, in the planner's words."""
        cache, scheduler = self.config.cache_config, self.config.scheduler_config
        return EngineRules(
            block_size=cache.block_size,
            kernel_block=32,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            concurrent_batches=self.config.max_concurrent_batches,
            state_element_bytes={"auto": 2, "float32": 4}[cache.mamba_ssm_cache_dtype],
        )

    def specs(self) -> dict[str, KVCacheSpec]:
        """One cache spec per layer, from the engine's reading of the config."""
        model, cache = self.config.model_config, self.config.cache_config
        kv_dtype = STR_DTYPE_TO_TORCH_DTYPE[self._dtype]
        common = {
            "num_kv_heads": model.get_num_kv_heads(self.config.parallel_config),
            "head_size": model.get_head_size(),
            "dtype": kv_dtype,
            "kv_quant_mode": get_kv_quant_mode(self._dtype),
        }
        if model.is_hybrid:
            cache.cache_dtype = self._dtype
            current_platform._align_hybrid_block_size(self.config, CPUAttentionBackend)
        text = model.hf_text_config
        kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
        window = getattr(text, "sliding_window", None)
        found: dict[str, KVCacheSpec] = {}
        for layer in range(text.num_hidden_layers):
            kind = kinds[layer] if kinds else ("sliding_attention" if window else "full_attention")
            if model.use_mla:
                spec: KVCacheSpec = MLAAttentionSpec(
                    block_size=cache.block_size,
                    num_kv_heads=1,
                    head_size=model.get_head_size(),
                    dtype=kv_dtype,
                )
            elif kind in ("mamba", "linear_attention"):
                spec = self._state(cache.mamba_page_size_padded)
            elif kind == "sliding_attention" and window:
                spec = SlidingWindowSpec(
                    block_size=cache.block_size, sliding_window=window, dcp_sharded=False, **common
                )
            else:
                spec = FullAttentionSpec(block_size=cache.block_size, **common)
            found[f"layers.{layer}"] = spec
        return found

    def _state(self, padded: int | None) -> MambaSpec:
        architecture = self.config.model_config.architecture
        model_class, _ = ModelRegistry.resolve_model_cls(architecture, model_config=self.config.model_config)
        return MambaSpec(
            block_size=LENGTH,
            shapes=model_class.get_mamba_state_shape_from_config(self.config),
            dtypes=model_class.get_mamba_state_dtype_from_config(self.config),
            page_size_padded=padded,
        )

    def capacity(self, budgets: list[int]) -> tuple[int, int, float]:
        """(blocks, tokens, concurrency) of one budget per pipeline rank."""
        specs, ranks = self.specs(), len(budgets)
        names = list(specs)
        workers = []
        for rank in range(ranks):
            first, end = get_pp_indices(len(names), rank, ranks)
            workers.append({name: specs[name] for name in names[first:end]})
        found = get_kv_cache_configs(self.config, workers, budgets)
        tokens, concurrency = get_kv_cache_capacity(self.config, found[0])
        return found[0].num_blocks, tokens, concurrency


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """One engine configuration per model, made once: each takes seconds."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: Engine(folder / name, CONFIGS[name]))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_blocks_tokens_and_sequences_equal_the_engines(name: str, engines: Callable[[str], Engine]) -> None:
    geometry = Geometry.from_config(CONFIGS[name])
    for ranks, dtype in product(
        [1] if name == "smollm2-135m" else [1, 2], ["bfloat16", "fp8"]
    ):  # 9 heads don't split
        for budget in BUDGETS:
            engine = engines(name).use(dtype, ranks)
            layout = kv_layout(geometry, dtype, engine.rules, ranks)
            assert_equal(layout.pool(budget, LENGTH), engine.capacity([budget]))


@pytest.mark.parametrize("name", ["qwen2.5-7b", "gemma-3-1b", "deepseek-v2-lite"])
def test_the_tightest_pipeline_rank_decides_as_in_the_engine(
    name: str, engines: Callable[[str], Engine]
) -> None:
    engine = engines(name).use("bfloat16")
    layout = kv_layout(Geometry.from_config(CONFIGS[name]), "bfloat16", engine.rules, pipeline_parallel=2)
    for budgets in ([2 * GIB, 3 * GIB], [3 * GIB, 2 * GIB]):
        assert_equal(layout.pool(budgets, LENGTH), engine.capacity(budgets))


@pytest.mark.parametrize("length", [500, 4095])
def test_lengths_that_end_within_a_block(length: int, engines: Callable[[str], Engine]) -> None:
    engine = engines("gemma-2-9b").use("bfloat16", length=length)
    layout = kv_layout(Geometry.from_config(CONFIGS["gemma-2-9b"]), "bfloat16", engine.rules)
    assert_equal(layout.pool(3 * GIB, length), engine.capacity([3 * GIB]))


def assert_equal(pool: KvPool, reported: tuple[int, int, float]) -> None:
    assert (pool.blocks, pool.tokens, pool.logged_sequences) == reported


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"])
def test_per_token_head_pages_are_the_backends(dtype: str) -> None:
    backend = pytest.importorskip("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=128, dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype],
        kv_quant_mode=get_kv_quant_mode(dtype),
    )  # fmt: skip
    page = backend.customize_spec(spec).page_size_bytes
    shape = Geometry.from_config(CONFIGS["qwen2.5-7b"])
    assert kv_layout(shape, dtype, EngineRules(block_size=16)).block_bytes == (28 * page,)


def test_nvfp4_pages_are_the_backends() -> None:
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

    shape = Geometry.from_config(CONFIGS["qwen2.5-7b"])
    assert kv_layout(shape, "nvfp4", EngineRules()).block_bytes == (
        28 * 16 * 4 * 2 * nvfp4_kv_cache_full_dim(128),
    )


@pytest.mark.parametrize(
    "dtype", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"]
)
def test_turboquant_slots_and_outer_layers_are_the_engines(
    dtype: str, engines: Callable[[str], Engine]
) -> None:
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    engine = engines("qwen2.5-7b")
    slot = TurboQuantConfig.from_cache_dtype(dtype, 128).slot_size_aligned
    outer = TurboQuantConfig.get_boundary_skip_layers(engine.config.model_config)
    layout = kv_layout(
        Geometry.from_config(CONFIGS["qwen2.5-7b"]), dtype, replace(EngineRules(), block_size=16)
    )
    per_token = 4 * (slot * (28 - len(outer)) + 512 * len(outer))
    assert layout.kappa_bytes == per_token
    assert layout.block_bytes == (layout.block_size * per_token,)


def test_skipped_layers_are_the_engines(engines: Callable[[str], Engine]) -> None:
    """FP8 beside four layers at 16 bits: the engine's own alignment of the block, and its own sizing."""
    skipped = frozenset({0, 1, 26, 27})
    engine = engines("qwen2.5-7b").use("fp8")
    cache = engine.config.cache_config
    cache.cache_dtype, cache.kv_cache_dtype_skip_layers = "fp8", [str(layer) for layer in skipped]
    try:
        current_platform._align_heterogeneous_kv_block_size(engine.config, CPUAttentionBackend)
        specs = engine.specs()
        for layer in skipped:
            wide = STR_DTYPE_TO_TORCH_DTYPE["bfloat16"]
            specs[f"layers.{layer}"] = replace(
                specs[f"layers.{layer}"], dtype=wide, kv_quant_mode=get_kv_quant_mode("auto")
            )
        for budget in BUDGETS:
            found = get_kv_cache_configs(engine.config, [specs], [budget])
            tokens, concurrency = get_kv_cache_capacity(engine.config, found[0])
            rules = EngineRules(block_size=32, kernel_block=32, concurrent_batches=1)
            layout = kv_layout(Geometry.from_config(CONFIGS["qwen2.5-7b"]), "fp8", rules, skipped=skipped)
            assert layout.kappa_bytes == 4 * (24 * 256 + 4 * 512)
            assert_equal(layout.pool(budget, LENGTH), (found[0].num_blocks, tokens, concurrency))
    finally:
        cache.kv_cache_dtype_skip_layers = []
        engine.use("bfloat16")


def test_default_limits_are_the_engines(engines: Callable[[str], Engine]) -> None:
    """On a CPU: one step at a time, 2,048 tokens in it. A change of default would shift every windowed model."""
    rules = engines("smollm2-135m").use("bfloat16").rules
    assert (rules.concurrent_batches, rules.max_num_batched_tokens) == (1, 2048)
