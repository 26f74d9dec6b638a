"""Doctor says beforehand what the stage `quantize` would refuse, in the stage's own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.doctor import examine
from pipeline.doctor.check import Check, guarded
from pipeline.doctor.quantizing import check_leaks, check_overlap, check_room, check_tokens
from pipeline.models.architectures import geometry
from pipeline.quantize import room
from pipeline.quantize.room import GIB, card_of, refuse_without_room, room_for
from pipeline.results import Environment
from pipeline.settings import Settings, load_settings
from tests.support.recorded_nvml import RecordedNvml, rtx_4090
from tests.support.tiny_models import LLAMA, prose, write_model, write_texts

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone as working folder, a machine with 30 GiB free, an offline hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(room, "free_memory", lambda: 30 * GIB)
    return tmp_path


def found(check: Callable[[], Any]) -> dict[str, Check]:
    return {one.name: one for one in guarded("raised", check)}


# --- room --------------------------------------------------------------------------------------------------------


def test_room_of_every_quantizer_on_host_card_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, idle = load_settings(["profile=rtx4090-full"], ROOT), RecordedNvml(rtx_4090())
    told = found(lambda: check_room(settings, idle))
    schemes = ("awq", "awq-lc", "awq-lc-kv", "bf16-kv", "gptq", "fp8", "fp8-kv")
    assert {name: check.status for name, check in told.items()} == {f"room {name}": "ok" for name in schemes}
    assert "19.2 GiB of memory (30.0 free)" in told["room awq"].found
    assert "GiB of the card's memory (NVIDIA GeForce RTX 4090) (23.6 free)" in told["room awq-lc-kv"].found
    held = RecordedNvml(rtx_4090(processes={9001: ("/opt/engine", 7_500)}))
    told = found(lambda: check_room(settings, held))
    assert (told["room awq"].status, told["room awq-lc-kv"].status) == ("ok", "fail")
    assert told["room awq-lc-kv"].exit_code == 3
    monkeypatch.setattr(room, "free_memory", lambda: 16 * GIB)
    told = found(lambda: check_room(settings, idle))
    assert {check.status for check in told.values()} == {"fail"}
    # The stage's own sentence.
    sizes = geometry(dict(settings.model.config or {}), "config")
    with pytest.raises(Exception) as refusal:
        refuse_without_room(
            room_for(sizes, settings.quantizers["awq"], on_cuda=True),
            Path("out").absolute(),
            card_of("cuda", idle),
        )
    assert str(refusal.value) == f"{told['room awq'].found}; {told['room awq'].fix}"


def test_too_little_room_for_what_is_made_is_a_warning(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: GIB)
    settings = load_settings(["profile=demo"], ROOT)
    assert found(lambda: check_room(settings))["room awq"].status == "fail"
    (clone / "runs/demo/weights/awq").mkdir(parents=True)
    assert found(lambda: check_room(settings))["room awq"].status == "warn"


def test_a_quantizer_that_cannot_is_left_to_its_own_check() -> None:
    settings = load_settings(["profile=demo", "quantizer_names={awq: autoawq-g128}"], ROOT)
    assert found(lambda: check_room(settings)) == {}


# --- texts -------------------------------------------------------------------------------------------------------


def with_texts(folder: Path, calibration: list[str], heldout: list[str]) -> Settings:
    values = load_settings(["profile=demo"], ROOT).model_dump()
    values["calibration"] |= {
        "file": str(write_texts(folder / "calibration.jsonl", calibration)),
        "heldout_file": str(write_texts(folder / "heldout.jsonl", heldout)),
    }
    return Settings.model_validate(values)


def test_held_out_text_that_is_calibration_text_is_said_beforehand(clone: Path) -> None:
    apart = with_texts(clone, prose(5, seed=1), prose(5, seed=2))
    assert found(lambda: check_overlap(apart))["calibration text"].status == "ok"
    shared = with_texts(clone, prose(5, seed=1), [*prose(2, seed=2), prose(5, seed=1)[3]])
    told = found(lambda: check_overlap(shared))["raised"]
    assert (told.status, told.exit_code) == ("fail", 2)
    assert "text 't2' is in" in told.found and "they must not overlap" in told.found


def test_an_eval_item_in_the_calibration_text_is_said_beforehand(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    settings = load_settings(["profile=demo"], ROOT)
    assert found(lambda: check_leaks(settings))["calibration and eval items"].status == "ok"
    items = Path(str(settings.evalset.folder)) / "items.jsonl"
    records = map(json.loads, items.read_text(encoding="utf-8").splitlines())
    prompts = [one["prompt"] + one["choices"][one["answer"]] for one in records if "choices" in one]
    told = found(lambda: check_leaks(with_texts(clone, prompts, ["y" * 600])))["raised"]
    assert (told.status, told.exit_code) == ("fail", 2)


def test_tokens_are_counted_where_the_model_is_at_hand(clone: Path) -> None:
    """The tiny model's tokenizer makes a token of every byte: 1,024 are needed, in sequences of 128."""
    write_model(clone / "runs/demo/weights/bf16", LLAMA)
    enough = with_texts(clone, ["x" * 1100], ["y" * 600])
    told = found(lambda: check_tokens(enough))
    assert [(name, check.status) for name, check in told.items()] == [
        ("calibration tokens awq", "ok"), ("held-out tokens", "ok"),
    ]  # fmt: skip
    assert (
        "1152 tokens are used, by the model's own tokenizer; 1024 are needed"
        in told["calibration tokens awq"].found
    )
    few = with_texts(clone, ["x" * 800], ["y" * 200])
    told = found(lambda: check_tokens(few))
    assert {(check.status, check.exit_code) for check in told.values()} == {("fail", 2)}
    assert "holds 800 tokens" in told["calibration tokens awq"].found
    assert "gives 0 tokens in windows of 256" in told["held-out tokens"].found


def test_tokens_are_counted_with_a_local_models_tokenizer(clone: Path) -> None:
    values = with_texts(clone, ["x" * 800], ["y" * 600]).model_dump()
    values["model"]["source"] = {"kind": "local", "path": str(write_model(clone / "mine", LLAMA))}
    told = found(lambda: check_tokens(Settings.model_validate(values)))
    assert (told["calibration tokens awq"].status, told["held-out tokens"].status) == ("fail", "ok")


@pytest.mark.parametrize(("size", "status"), [(3000, "warn"), (4500, "warn"), (6000, "ok")])
def test_tokens_are_guessed_where_it_is_not(clone: Path, size: int, status: str) -> None:
    told = found(lambda: check_tokens(with_texts(clone, ["x" * size], ["y" * 4000])))
    assert (told["calibration tokens awq"].status, told["held-out tokens"].status) == (status, "ok")
    assert f"about {size // 4} tokens" in told["calibration tokens awq"].found


def test_a_chat_without_a_template_is_refused_without_the_model_too(clone: Path) -> None:
    settings = with_texts(clone, ["x" * 8000], ["y" * 4000])
    chat = {"id": "c", "messages": [{"role": "user", "content": "z" * 8000}]}
    Path(settings.calibration.file).write_text(json.dumps(chat))
    told = found(lambda: check_tokens(settings))["calibration tokens awq"]
    assert (told.status, told.exit_code) == ("fail", 2)
    assert "'c' is a chat" in told.found


def test_the_checks_are_among_doctors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    machine = Environment(
        cpu_model="Some CPU", cpu_flags=["avx2"], cpu_count=8, memory_bytes=64 * GIB, gpus=[], platform="Linux",
        python="3.11", packages={}, locks={},
    )  # fmt: skip
    names = [check.name for check in examine(load_settings(["profile=demo"], ROOT), machine)]
    assert {
        "room awq",
        "calibration text",
        "calibration and eval items",
        "calibration tokens awq",
        "held-out tokens",
    } <= set(names)
