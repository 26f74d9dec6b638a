"""When the plugin acts, what it says, and that vLLM finds it: in processes of their own, as vLLM loads it once per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from pipeline.serving.cpu_plugin import detect
from pipeline.serving.cpu_plugin.plugin_path import plugin_pythonpath

HERE = Path(__file__).parent
AVX2_ONLY = str(HERE.parent / "support" / "avx2_only")
HAS_AVX512 = torch.cpu._is_avx512_supported()
# Loads vLLM's plugins as its processes do, twice, and shows what is registered.
LOAD = """
import logging
logging.basicConfig(level=logging.INFO)  # vLLM sets its own up later, in its servers
import vllm.plugins
vllm.plugins.load_general_plugins()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
from vllm.platforms import PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm import envs
print("kernels:", [kernel.__name__ for kernel in _POSSIBLE_KERNELS[PlatformEnum.CPU]].count("Int4PackLinearKernel"))
print("disabled:", envs.VLLM_DISABLED_KERNELS)
print("attention:", AttentionBackendEnum.CPU_ATTN.get_path())
"""


def run(code: list[str], *, avx2: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    path = [plugin_pythonpath()] + ([AVX2_ONLY] if avx2 else [])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_LOGGING_LEVEL": "INFO",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *code], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )


def test_without_avx512_both_parts_are_emulated_once_and_said():
    done = run(["-c", LOAD], avx2=True, VLLM_DISABLED_KERNELS="SomeOtherKernel")
    assert "kernels: 1\n" in done.stdout, done.stderr
    assert "disabled: ['SomeOtherKernel', 'CPUWNA16LinearKernel']" in done.stdout
    assert "pipeline.serving.cpu_plugin.fp8_attention.Fp8CPUAttentionBackend" in done.stdout
    line = "quantgate-cpu-plugin: active int4_awq_linear=emulated fp8_kv_attention=emulated version="
    assert (done.stdout + done.stderr).count(line) == 1


@pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512")
def test_with_avx512_the_stock_kernels_are_left_alone():
    done = run(["-c", LOAD], avx2=False)
    assert "kernels: 0\n" in done.stdout, done.stderr
    assert "disabled: []" in done.stdout
    assert "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend" in done.stdout
    said = done.stdout + done.stderr
    assert said.count("quantgate-cpu-plugin: inactive (stock kernels) fp8_kv_rounding=toward-zero\n") == 1


@pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512")
@pytest.mark.parametrize(
    ("told", "kernels", "attention", "said"),
    [
        (
            "int4=on,fp8_kv=auto",
            1,
            "backends.cpu_attn.CPUAttentionBackend",
            "int4_awq_linear=emulated fp8_kv_attention=stock",
        ),
        (
            "int4=off,fp8_kv=on",
            0,
            "Fp8CPUAttentionBackend",
            "int4_awq_linear=stock fp8_kv_attention=emulated",
        ),
    ],
)
def test_with_avx512_a_part_is_taken_where_the_settings_say_so(told, kernels, attention, said):
    done = run(["-c", LOAD], avx2=False, QUANTGATE_CPU_PLUGIN=told)
    assert f"kernels: {kernels}\n" in done.stdout, done.stderr
    assert f"disabled: {['CPUWNA16LinearKernel'] if kernels else []}\n" in done.stdout
    assert attention in done.stdout
    assert (done.stdout + done.stderr).count(f"quantgate-cpu-plugin: active {said} version=") == 1


@pytest.mark.skipif(not HAS_AVX512, reason="this machine's run is the AVX2 run already")
def test_kernels_with_avx2_only():
    """The same tests with AVX2 kernels: what a machine without AVX-512 runs."""
    files = [str(HERE / "test_int4_linear.py"), str(HERE / "test_fp8_attention.py")]
    chosen = "awq_layer and dtype0 or equals_stock and mixed or matches_float32 and mixed or e5m2"
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen], avx2=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


class TestNeeds:
    """Each part on its own: the answers of the two probes decide, and only on an x86 CPU."""

    @pytest.fixture
    def machine(self, monkeypatch):
        def set_to(int4: bool, fp8: bool, *, x86_cpu: bool = True, mode: str | None = None) -> detect.Needs:
            monkeypatch.setattr(detect, "stock_multiplies_int4", lambda: int4)
            monkeypatch.setattr(detect, "stock_reads_fp8", lambda: fp8)
            monkeypatch.setattr(detect, "_x86_cpu", lambda: x86_cpu)
            monkeypatch.delenv(detect.VARIABLE, raising=False)
            if mode is not None:
                monkeypatch.setenv(detect.VARIABLE, mode)
            return detect.needs()

        return set_to

    @pytest.mark.parametrize("int4", [True, False])
    @pytest.mark.parametrize("fp8", [True, False])
    def test_a_part_is_emulated_where_its_stock_kernel_is_missing(self, machine, int4, fp8):
        assert machine(int4, fp8) == detect.Needs(int4_awq_linear=not int4, fp8_kv_attention=not fp8)
        assert detect.needed() == (not (int4 and fp8))

    @pytest.mark.parametrize("mode", [None, "on"])
    def test_never_on_another_platform(self, machine, mode):
        assert machine(False, False, x86_cpu=False, mode=mode) == detect.Needs(False, False)
        assert detect.stock_fp8_rounding() is None

    def test_on_and_off(self, machine):
        assert machine(True, True, mode="on") == detect.Needs(True, True)
        assert machine(False, False, mode="off") == detect.Needs(False, False)

    def test_each_part_by_its_own_word(self, machine):
        assert machine(True, True, mode="int4=on") == detect.Needs(True, False)
        assert machine(True, False, mode="int4=on,fp8_kv=off") == detect.Needs(True, False)
        assert machine(False, True, mode="int4=auto,fp8_kv=on") == detect.Needs(True, True)


def test_cuda_is_another_platform(monkeypatch):
    from vllm import platforms

    monkeypatch.setattr(platforms.current_platform, "is_cpu", lambda: False, raising=False)
    assert not detect._x86_cpu()


def test_the_fp8_probe_agrees_with_the_engine():
    """When vLLM learns to read FP8 without AVX-512, this says that the emulation is no longer needed."""
    try:
        _get_attn_isa(torch.bfloat16, 128, 64, "fp8")
        accepted = True
    except NotImplementedError:
        accepted = False
    assert detect.stock_reads_fp8() == accepted


def test_the_stock_kernels_rounding_is_found():
    """When it becomes 'nearest', the remark in the log goes away by itself and the note in `detect` can go."""
    assert detect.stock_fp8_rounding() == ("toward-zero" if detect.stock_reads_fp8() else None)
