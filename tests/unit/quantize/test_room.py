"""Room on the host, on the card and on the disk, and what a control group leaves of the host's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import EnvironmentUnfitError, QuantgateError
from pipeline.models.architectures import geometry
from pipeline.quantize import base, room
from pipeline.quantize.base import check_request, quantize
from pipeline.quantize.room import GIB, card_of, free_memory, room_for, stored_element_bytes
from pipeline.settings.schema import QuantizeRecipe
from tests.support.geometries import QWEN25_7B, SMOLLM2
from tests.support.quantize_requests import tiny_request
from tests.support.recorded_nvml import SECOND_UUID, UUID, RecordedNvml, mig_card, rtx_4090

SEVEN = geometry(QWEN25_7B, "Qwen2.5-7B")
AWQ = QuantizeRecipe(group_size=128, samples=64, sequence_tokens=256)
LC = AWQ.model_copy(update={"backend": "llmcompressor", "clip_search": False})


# --- what it takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [AWQ, LC])
def test_a_workstation_of_32_gib_with_a_4090_quantizes_qwen_7b(recipe: QuantizeRecipe) -> None:
    on_card, on_cpu = room_for(SEVEN, recipe, on_cuda=True), room_for(SEVEN, recipe)
    assert 40 < on_cpu.memory_bytes / GIB < 41 and on_cpu.card_bytes is None
    assert 14.2 + 3 < on_card.memory_bytes / GIB < 22  # in 16 bits, and CUDA's libraries
    assert on_card.disk_bytes == on_cpu.disk_bytes
    assert on_card.card_bytes is not None
    assert 14.2 + 1 < on_card.card_bytes / GIB < 23.64 - 2  # the model, and a desktop beside it


def test_llm_compressor_searches_beside_the_whole_model_and_autoawq_one_layer_at_a_time() -> None:
    whole, layers = (
        room_for(SEVEN, LC, on_cuda=True).card_bytes,
        room_for(SEVEN, AWQ, on_cuda=True).card_bytes,
    )
    assert whole is not None and layers is not None
    assert 2 < (whole - layers) / GIB < 4
    # With much text it is the other way round: AutoAWQ takes all of it through a layer at once.
    much = {"samples": 256, "sequence_tokens": 512}
    whole, layers = (
        room_for(SEVEN, recipe.model_copy(update=much), on_cuda=True).card_bytes for recipe in (LC, AWQ)
    )
    assert whole is not None and layers is not None
    assert layers > whole


def test_a_checkpoint_in_float32_takes_twice_the_model() -> None:
    assert [
        stored_element_bytes(config) for config in ({"dtype": "float32"}, {"torch_dtype": "float32"})
    ] == [4, 4]
    assert [stored_element_bytes(config) for config in ({"dtype": "bfloat16"}, {})] == [2, 2]
    sizes = geometry(SMOLLM2, "SmolLM2")
    half, full = (
        room_for(sizes, AWQ.model_copy(update={"group_size": 64}), on_cuda=True, element_bytes=n)
        for n in (2, 4)
    )
    assert full.memory_bytes - half.memory_bytes > 2 * 134_000_000


# --- what is free ------------------------------------------------------------------------------------------------


def group(folder: Path, limit: int | str, used: int, inactive: int, *, version: int) -> None:
    """One control group's files, as the kernel writes them."""
    names = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("max", "current", "inactive_file"),
    }
    first, second, key = names[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{first}").write_text(f"{limit}\n")
    (folder / f"memory.{second}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1073741824\nfile 99\n{key} {inactive}\nactive_file 4096\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB free, whose control groups are in the folder that is returned."""
    available = psutil.virtual_memory()._replace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    return tmp_path / "cgroup"


def free(root: Path, own: str) -> float:
    root.mkdir(exist_ok=True)
    (root / "own").write_text(own)
    return free_memory(root, root / "own") / GIB


def test_page_cache_of_a_container_is_free_memory(machine: Path) -> None:
    group(machine, 32 * GIB, 31 * GIB, 20 * GIB, version=2)
    assert free(machine, "0::/\n") == 21


def test_a_container_of_version_1_has_a_limit_too(machine: Path) -> None:
    group(machine / "memory", 32 * GIB, 31 * GIB, 20 * GIB, version=1)
    # Without a name space of its own a container sees the host's path, which isn't mounted in it.
    assert free(machine, "9:name=systemd:/\n4:memory:/docker/0123abcd\n0::/\n") == 21


@pytest.mark.parametrize(
    ("version", "line"), [(1, "4:memory:/slurm/job_7/step_0\n"), (2, "0::/slurm/job_7/step_0\n")]
)
def test_the_tightest_limit_above_a_process_counts(machine: Path, version: int, line: str) -> None:
    mount = machine / "memory" if version == 1 else machine
    unlimited: int | str = 9223372036854771712 if version == 1 else "max"
    group(mount, unlimited, 50 * GIB, 0, version=version)
    group(mount / "slurm/job_7", 16 * GIB, 4 * GIB, GIB, version=version)
    group(mount / "slurm/job_7/step_0", unlimited, 4 * GIB, GIB, version=version)
    assert free(machine, line) == 13


def test_without_a_limit_it_is_the_machines(machine: Path) -> None:
    assert free(machine, "") == 64
    group(machine, "max", 50 * GIB, 0, version=2)
    group(machine / "memory", 9223372036854771712, 50 * GIB, 0, version=1)
    assert free(machine, "4:memory:/\n0::/\n") == 64


def test_the_card_is_the_first_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = RecordedNvml(rtx_4090(), rtx_4090(SECOND_UUID, processes={7: ("/bin/other", 10_240)}))
    found = card_of("cuda", two)
    assert found is not None and found.gpu.uuid == UUID and found.free_bytes == (24_564 - 354 - 2) * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = card_of("cuda", two)
    assert (
        found is not None
        and found.gpu.uuid == SECOND_UUID
        and found.free_bytes == (24_564 - 354 - 2 - 10_240) * 2**20
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert card_of("cuda", two) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert card_of("cpu", two) is None
    assert card_of("cuda", RecordedNvml(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) is None
    assert card_of("cuda", RecordedNvml(mig_card() | {"slices": []})) is None
    slice_ = card_of("cuda", RecordedNvml(mig_card()))
    assert slice_ is not None and slice_.gpu.uuid.startswith("MIG-")


# --- the stage ---------------------------------------------------------------------------------------------------


def test_a_card_that_others_hold_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(room, "free_memory", lambda: 64 * GIB)
    request = tiny_request(tmp_path, "cuda")
    check_request(request, card_of("cuda", RecordedNvml(rtx_4090())))
    held = RecordedNvml(rtx_4090(processes={9001: ("/opt/engine", 23_700)}))
    with pytest.raises(
        EnvironmentUnfitError,
        match=r"about 1\.\d\d GiB of the card's memory \(NVIDIA GeForce RTX 4090\), and 0\.50 GiB are free; end what",
    ):
        quantize(request, sys.executable, log_path=tmp_path / "quantize.log", nvml=held)


def test_backend_and_proof_see_the_card_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(room, "free_memory", lambda: 64 * GIB)
    seen: list[Mapping[str, str]] = []

    def run_module(*_: Any, environment: Mapping[str, str], **__: Any) -> dict[str, Any]:
        seen.append(environment)
        if len(seen) == 2:
            raise QuantgateError("far enough")
        return {}

    monkeypatch.setattr(base, "run_module", run_module)
    two = RecordedNvml(rtx_4090(), rtx_4090(SECOND_UUID))
    with pytest.raises(QuantgateError, match="far enough"):
        quantize(tiny_request(tmp_path, "cuda"), sys.executable, log_path=tmp_path / "quantize.log", nvml=two)
    assert [(env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) for env in seen] == [
        ("PCI_BUS_ID", "1")
    ] * 2
    assert "MALLOC_MMAP_THRESHOLD_" in seen[0]
