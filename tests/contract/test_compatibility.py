"""The tables against the packages as installed, read as text: nothing of a quantizer is imported here."""

from __future__ import annotations

import ast
import re
from importlib.metadata import distributions
from pathlib import Path

from pipeline.capacity.families import FAMILIES
from pipeline.compatibility.quantizers import AUTOAWQ_MODEL_TYPES, QUANTIZERS
from pipeline.models.architectures import SUPPORTED
from tests.support.environments import environment_python

ROOT = Path(__file__).resolve().parents[2]


def packages(environment: str) -> Path:
    [folder] = (environment_python(environment).parents[1] / "lib").glob("python3.*/site-packages")
    return folder


def keys_of(path: Path, variable: str) -> set[str]:
    """Keys of the dict literal that is assigned to `variable`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == variable for target in targets)
        if named and isinstance(getattr(node, "value", None), ast.Dict):
            return {ast.literal_eval(key) for key in node.value.keys}  # type: ignore[attr-defined]
    raise AssertionError(f"{path}: no {variable}")


def model_type(architecture: str) -> str:
    """`Qwen3MoeForCausalLM` as `qwen3_moe`, the way model types are spelled."""
    words = re.sub(r"For\w+$", "", architecture)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()


def version_of(folder: Path, package: str) -> str:
    return next(found.version for found in distributions(path=[str(folder)]) if found.name == package)


def test_autoawq_knows_what_the_table_says() -> None:
    folder = packages("autoawq")
    assert version_of(folder, "autoawq") == QUANTIZERS["autoawq"].version
    real = keys_of(folder / "awq" / "models" / "auto.py", "AWQ_CAUSAL_LM_MODEL_MAP")
    assert set(AUTOAWQ_MODEL_TYPES.values()) <= real
    left_out = {name for name in set(FAMILIES) - set(AUTOAWQ_MODEL_TYPES) if model_type(name) in real}
    assert not left_out, "AutoAWQ has a class for these too"
    assert frozenset(AUTOAWQ_MODEL_TYPES) == QUANTIZERS["autoawq"].architectures
    assert set(SUPPORTED) <= QUANTIZERS["autoawq"].architectures


def test_autoawq_demands_what_the_table_says() -> None:
    folder = packages("autoawq") / "awq"
    text = (folder / "quantize" / "quantizer.py").read_text(encoding="utf-8")
    assert "org_w_shape[-1] % self.group_size == 0" in text
    assert "oc_batch_size = 256 if org_w_shape[0] % 256 == 0 else 64" in text
    base = (folder / "models" / "base.py").read_text(encoding="utf-8")
    assert "May not work with other values than float16" in base
    gemm = (folder / "modules" / "linear" / "gemm.py").read_text(encoding="utf-8")
    assert "out_features % (32 // self.w_bit) == 0" in gemm


def test_the_backends_compute_in_what_the_table_says() -> None:
    """Ours ask for it: the table is what doctor says, the modules are what is done."""
    for name, on_cuda in (("autoawq", "torch.float16"), ("llmcompressor", '"auto"')):
        text = (ROOT / "pipeline" / "quantize" / f"{name}.py").read_text(encoding="utf-8")
        assert f"dtype={on_cuda} if job.on_cuda else torch.float32" in text
        assert QUANTIZERS[name].computes_in["cpu"] == "float32"


def test_llmcompressor_knows_what_the_table_says() -> None:
    folder, row = packages("llmcompressor"), QUANTIZERS["llmcompressor"]
    assert version_of(folder, "llmcompressor") == row.version
    awq = folder / "llmcompressor" / "modifiers" / "transform" / "awq"
    real = keys_of(awq / "mappings.py", "AWQ_MAPPING_REGISTRY")
    assert row.architectures == real & set(FAMILIES), "of those that the planner models, all and no other"
    assert set(SUPPORTED) <= row.architectures
    helpers = folder / "compressed_tensors" / "quantization" / "lifecycle" / "forward_helpers.py"
    assert "columns >= group_size and columns % group_size != 0" in helpers.read_text(encoding="utf-8")


def test_the_engines_order_of_attention_backends() -> None:
    """Its CUDA platform can't be imported beside the CPU wheel, so its source is read: first the branch of 10.x, then the others."""
    text = (packages("serve") / "vllm" / "platforms" / "cuda.py").read_text(encoding="utf-8")
    body = text[text.index("def _get_backend_priorities") :]
    plain = body[
        body.index("if device_capability.major == 10 and not use_non_causal") : body.index(
            "def _backend_cls_path"
        )
    ]
    ten, others = plain.split("else:", 1)
    names = (
        "AttentionBackendEnum.FLASHINFER,",
        "AttentionBackendEnum.FLASH_ATTN,",
        "AttentionBackendEnum.TRITON_ATTN,",
    )
    assert [ten.index(name) for name in names] == sorted(ten.index(name) for name in names)
    order = (names[1], names[0], names[2])
    assert [others.index(name) for name in order] == sorted(others.index(name) for name in order)


def test_flashinfer_keeps_what_the_table_says() -> None:
    """FlashInfer isn't there beside the CPU wheel, so vLLM's backend for it is read."""
    path = packages("serve") / "vllm" / "v1" / "attention" / "backends" / "flashinfer.py"
    text = path.read_text(encoding="utf-8")
    [backend] = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name == "FlashInferBackend"
    ]
    found = {
        node.target.id: node.value
        for node in backend.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    }
    assert {"bfloat16", "float16", "fp8", "fp8_e4m3"} <= set(
        ast.literal_eval(found["supported_kv_cache_dtypes"])
    )
    assert "return [64, 128, 256, 512]" in text
    assert (
        "capability >= DeviceCapability(8, 0) and capability <= DeviceCapability(\n            12, 1" in text
    )
