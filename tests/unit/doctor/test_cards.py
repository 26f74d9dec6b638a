"""Doctor on machines with cards, written down: a desktop, a headless one, MIG, an old driver, two cards, none."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pynvml
import pytest

from pipeline.doctor.cards import cards_of, check_cards
from pipeline.doctor.check import Check
from pipeline.settings import Settings, load_settings
from tests.support.recorded_nvml import DESKTOP, SECOND_UUID, RecordedNvml, mig_card, rtx_4090

ROOT = Path(__file__).resolve().parents[3]
CUDA_13 = {"vllm": "0.32.0", "nvidia-cuda-runtime": "13.0.96"}


@pytest.fixture(autouse=True)
def no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@functools.cache
def settings(*overrides: str) -> Settings:
    return load_settings(["profile=rtx4090", *overrides], ROOT)


def examined(nvml: RecordedNvml, *overrides: str, lock: dict[str, str] | None = None) -> dict[str, Check]:
    found = list(check_cards(settings(*overrides), nvml, CUDA_13 if lock is None else lock))
    return {check.name: check for check in found}


def statuses(found: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in found.items()}


ALL_OK = {"driver": "ok", "GPU": "ok", "card memory": "ok", "memory held by others": "ok"}


def test_a_headless_4090_passes() -> None:
    found = examined(RecordedNvml(rtx_4090()))
    assert statuses(found) == ALL_OK
    assert found["GPU"].found == "NVIDIA GeForce RTX 4090, 23.64 GiB visible, compute capability 8.9"
    assert "580.95.05, runs CUDA up to 13.0" in found["driver"].found
    assert "no process that the driver names" in found["memory held by others"].found


def test_a_desktop_is_named_and_told_from_an_engine_that_leaves_no_room() -> None:
    found = examined(RecordedNvml(rtx_4090(processes=DESKTOP)))
    held = found["memory held by others"]
    assert held.status == "warn"
    assert "1.37 GiB are taken (browser 700 MiB, Xorg 412 MiB, gnome-shell 286 MiB)" in held.found
    # The engine's own context takes 0.37 to 0.53 GiB: what is left beside the desktop lies between.
    assert held.found.endswith("beside its own context of 0.37 to 0.53 GiB, and may refuse to start")
    assert held.fix == "end browser, or set device.memory_utilization to 0.91 at most"
    lower = examined(RecordedNvml(rtx_4090(processes=DESKTOP)), "device.memory_utilization=0.9")
    assert lower["memory held by others"].fix == "end them, or plan with device.held_gib=1.4"
    planned = examined(
        RecordedNvml(rtx_4090(processes=DESKTOP)), "device.held_gib=1.4", "device.memory_utilization=0.9"
    )
    assert statuses(planned) == ALL_OK


def test_the_engines_own_context_leaves_others_at_most_1_52_gib() -> None:
    """0.92 of 23.64 GiB beside 0.37 to 0.53 of context: 1.6 GiB are too many, 1.5 may be, and 1.25 leave no room for FlashInfer."""
    for held_mib, status, words in (
        (1_600, "fail", "beside its own context of 0.37 GiB and refuses to start"),
        (1_530, "warn", "may refuse to start"),
        (1_250, "warn", "FlashInfer's workspace of 0.38 GiB comes on top of its share and context"),
    ):
        nvml = RecordedNvml(rtx_4090(processes={77: ("/opt/other", held_mib)}))
        check = examined(nvml)["memory held by others"]
        assert check.status == status
        assert words in check.found

    engine = {77: ("/opt/venv/bin/python3", 20_000), **DESKTOP}
    held = examined(RecordedNvml(rtx_4090(processes=engine)))["memory held by others"]
    assert (held.status, held.exit_code) == ("fail", 3)
    assert "python3 20,000 MiB" in held.found and "refuses to start" in held.found
    assert held.fix == "end python3, or set device.memory_utilization to 0.09 at most"


def test_the_utilization_that_is_named_really_starts() -> None:
    nvml = RecordedNvml(rtx_4090(processes={77: ("/opt/other", 6_000)}))
    fix = examined(nvml)["memory held by others"].fix
    most = float(fix.split()[-3])
    assert examined(nvml, f"device.memory_utilization={most}")["memory held by others"].status == "warn"
    assert (
        examined(nvml, f"device.memory_utilization={most + 0.02:.2f}")["memory held by others"].status
        == "fail"
    )


def test_an_old_driver_is_refused_with_the_one_to_install() -> None:
    old = RecordedNvml(rtx_4090(), driver="550.163.01", cuda=12_040)
    driver = examined(old)["driver"]
    assert (driver.status, driver.exit_code, driver.fix) == ("fail", 3, "install driver 580 or newer")
    assert "550.163.01, runs CUDA up to 12.4; the engine is built with CUDA 13" in driver.found
    assert statuses(examined(old))["memory held by others"] == "ok", "later checks are still made"
    assert examined(old, lock={"nvidia-cuda-runtime-cu12": "12.8.90"})["driver"].status == "ok"
    ancient = RecordedNvml(rtx_4090(), driver="470.256.02", cuda=11_040)
    assert examined(ancient, lock={"nvidia-cuda-runtime-cu12": "12.8.90"})["driver"].fix.endswith(
        "525 or newer"
    )


@pytest.mark.parametrize(
    ("card", "status", "words"),
    [
        (rtx_4090(total=16_380, reserved=340), "fail", "15.66 GiB visible"),
        (rtx_4090(total=32_607, reserved=460), "warn", "the card has more"),
        (rtx_4090(reserved=362), "ok", "23.64"),  # 8 MiB less: within what a conf file can say
    ],
)
def test_the_cards_memory_against_the_conf(card: dict[str, Any], status: str, words: str) -> None:
    memory = examined(RecordedNvml(card))["card memory"]
    assert memory.status == status
    assert words in memory.found
    if status != "ok":
        visible = (card["total"] - card["reserved"]) / 1024
        assert f"device.memory_gib to {visible:.2f}" in memory.fix


def test_mig_slices_are_a_warning_and_a_card_without_one_a_failure() -> None:
    sliced = examined(RecordedNvml(mig_card()), "device.memory_gib=19.48")
    assert sliced["GPU"].status == "warn"
    assert "shares power and clocks" in sliced["GPU"].found
    assert sliced["card memory"].status == "ok"
    empty = examined(RecordedNvml(mig_card() | {"slices": []}))
    assert (empty["GPU"].status, empty["GPU"].exit_code) == ("fail", 3)
    assert "mig -cgi" in empty["GPU"].fix


def test_of_two_cards_the_first_is_taken_or_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    both = RecordedNvml(rtx_4090(processes=DESKTOP), rtx_4090(SECOND_UUID))
    found = examined(both)
    assert "card 0 of 2; CUDA_VISIBLE_DEVICES chooses" in found["GPU"].found
    assert found["memory held by others"].status == "warn"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert statuses(examined(both)) == ALL_OK
    assert [gpu.uuid for gpu in cards_of(settings(), both)] == [SECOND_UUID]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert cards_of(settings(), both) == []


def test_too_few_cards_for_tensor_parallel() -> None:
    found = examined(RecordedNvml(rtx_4090()), "server.tensor_parallel=2")
    assert (found["GPU"].status, found["GPU"].exit_code) == ("fail", 3)
    assert "2 cards are needed, and 1 visible" in found["GPU"].found
    both = RecordedNvml(rtx_4090(), rtx_4090(SECOND_UUID))
    checks = list(check_cards(settings("server.tensor_parallel=2"), both, CUDA_13))
    assert [check.name for check in checks].count("card memory") == 2


@pytest.mark.parametrize(
    ("error", "words", "fix"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver", "run it on a machine with that card"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "repair the driver"),
    ],
)
def test_without_a_driver_the_reason_is_said(error: int, words: str, fix: str) -> None:
    [check] = check_cards(settings(), RecordedNvml(error=error), CUDA_13)
    assert (check.status, check.exit_code) == ("fail", 3)
    assert words in check.found and "there is no card; the profile rtx4090 serves on one" in check.found
    assert fix in check.fix
    [check] = check_cards(settings(), RecordedNvml(), CUDA_13)
    assert "the driver sees no card" in check.found
