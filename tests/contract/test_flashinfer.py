"""The locked FlashInfer, not a stand-in, under the installed vLLM on an emulated RTX 4090: what it is asked for, and what it says where
a tool is missing.

It runs on the CPU environment's torch; only the driver's answers are made up (tests/support/emulated_card.py).
`make card-check` compiles the same modules with the real nvcc.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.compatibility.compilers import SAMPLER, SAMPLER_MODULE, compiled_modules
from pipeline.environments.toolkit import NO_NINJA, NO_NVCC
from pipeline.serving.command import ServeSpec, build_command, build_environment
from pipeline.serving.engine import locked_engine
from pipeline.serving.failures import failure_cause
from tests.contract.test_serving_flags import RTX_4090
from tests.support.environments import environment_python
from tests.support.fake_toolkit import environment_with_toolkit, host_tools
from tests.support.flashinfer_package import flashinfer_folder

REPOSITORY = Path(__file__).resolve().parents[2]
# Attention backend -> the caches that the profile rtx4090 and its controls serve on it.
SERVED = {
    "FLASH_ATTN": ("bfloat16",),
    "FLASHINFER": ("bfloat16", "fp8"),
    "TRITON_ATTN": ("bfloat16", "fp8", "fp8_per_token_head"),
}
CASES = [(backend, dtype) for backend, dtypes in SERVED.items() for dtype in dtypes]
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 2, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen2.5-7B-Instruct's own config.json, two of its layers."""


class Machine:
    """A machine for a card: tools on its PATH, and an environment with a toolkit, or without."""

    def __init__(
        self, folder: Path, tools: tuple[str, ...] = (), *, ninja: bool = False, toolkit: bool = False
    ) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.environment = folder / "environment"
        self.tools = host_tools(folder / "tools", tools)
        self.inherited = {
            "PATH": str(self.tools),
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        real = environment_python("serve").parent / "ninja"
        if toolkit:
            environment_with_toolkit(self.environment, real, self.calls)
        elif ninja:
            (self.environment / "bin").mkdir(parents=True)
            (self.environment / "bin" / "ninja").symlink_to(real)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(QWEN))

    def spec(self, backend: str, dtype: str, variables: dict[str, str]) -> ServeSpec:
        return ServeSpec(
            locked_engine()[1], self.folder / "model", f"{backend} {dtype}", "cuda", 8192, 128, kv_cache_dtype=dtype, block_size=16,
            gpu_memory_utilization=0.92, enforce_eager=False, extra_args=("--attention-backend", backend), environment=variables,
        )  # fmt: skip

    def start(
        self, cases: list[tuple[str, str]], variables: dict[str, str], patch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        """What vLLM asks FlashInfer for, for servers of these (backend, KV dtype), as a server's process would see the machine."""
        specs = [self.spec(backend, dtype, variables) for backend, dtype in cases]
        patch.setenv("XDG_CACHE_HOME", self.inherited["XDG_CACHE_HOME"])
        engine = build_environment(
            specs[0],
            self.inherited | {"PYTHONPATH": str(self.package)},
            python=self.environment / "bin" / "python",
        )
        patch.undo()
        argv = {
            spec.served_name: [*build_command(spec, "python", 1)[3:], "--skip-tokenizer-init"]
            for spec in specs
        }
        done = subprocess.run(
            [environment_python("serve"), "-m", "tests.support.flashinfer_child"],
            input=json.dumps({"card": RTX_4090, "argv": argv}),
            # Without a network vLLM asks NVIDIA's server for cubins in vain, for seconds.
            env=engine | {"FLASHINFER_CUBINS_REPOSITORY": "http://127.0.0.1:9"},
            cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answers

    @property
    def package(self) -> Path:
        return flashinfer_folder()


def asked(answers: dict[str, Any], case: tuple[str, str]) -> tuple[str, ...]:
    return tuple(answers[" ".join(case)]["asked"])


def causes(answers: dict[str, Any]) -> set[str]:
    return {failure_cause(error) for answer in answers.values() for error in answer["errors"]}


def test_without_tools_what_needs_them_ends_in_doctors_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what doesn't need them doesn't ask FlashInfer for anything: the table of compilers is what vLLM does."""
    answers = Machine(tmp_path).start(CASES, {}, monkeypatch)
    for case in CASES:
        assert asked(answers, case) == compiled_modules(*case, {}), case
        answer = answers[" ".join(case)]
        assert answer["sampler"] is False
        assert bool(answer["errors"]) is bool(answer["asked"]), answer["errors"]
    assert causes(answers) == {NO_NINJA}


def test_vllms_own_default_would_ask_for_the_sampler_in_every_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SAMPLER_DEFAULT keeps away: without a compiler not even BF16 on FlashAttention would start. Only nvcc is missing here."""
    variables = {SAMPLER: "1"}
    answers = Machine(tmp_path, ("sh", "which"), ninja=True).start(CASES, variables, monkeypatch)
    for case in CASES:
        assert asked(answers, case) == compiled_modules(*case, variables), case
        assert SAMPLER_MODULE in asked(answers, case)
        assert answers[" ".join(case)]["errors"]
    assert causes(answers) == {NO_NVCC}


def test_the_environments_toolkit_is_used_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the machine's: a toolkit on the PATH, in CUDA_PATH and in FlashInfer's own variables would break the build."""
    case = ("FLASHINFER", "fp8")
    machine = Machine(tmp_path, ("as", "c++", "g++", "gcc", "ld", "sh", "which"), toolkit=True)
    for name in ("nvcc", "ninja"):
        other = machine.tools / name
        other.write_text("#!/bin/sh\nexit 1\n")
        other.chmod(0o755)
    machine.inherited |= {
        "CUDA_HOME": "/elsewhere",
        "CUDA_PATH": "/elsewhere",
        "FLASHINFER_NVCC": str(machine.tools / "nvcc"),
    }
    machine.start([case], {SAMPLER: "1"}, monkeypatch)
    called = machine.calls.read_text().splitlines()
    assert all(line.startswith(f"{machine.environment}/cuda/bin/nvcc ") for line in called)
    assert all("-gencode=arch=compute_89,code=sm_89" in line for line in called)
    made = {path.stem for path in (tmp_path / "cache").rglob("cached_ops/*/*.so")}
    assert made == set(compiled_modules(*case, {SAMPLER: "1"}))
    machine.start([case], {SAMPLER: "1"}, monkeypatch)
    assert machine.calls.read_text().splitlines() == called, "the second start compiles nothing"
