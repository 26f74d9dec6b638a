"""The ladder of the shipped profiles: the planner's numbers, and commands that do what they say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.planning.rescue import ProfileOutlook, way_of, ways_of
from pipeline.planning.scenario import geometry_of
from pipeline.results import Decision, Gpu, Rung
from pipeline.serving.engine import check_engine
from pipeline.settings import Settings, load_settings
from pipeline.verdict.ladder import Known, Way, ladder
from tests.support import sample_results

ROOT = Path(__file__).resolve().parents[3]
RTX_4090 = Gpu(
    index=0, uuid="GPU-0", name="NVIDIA GeForce RTX 4090", memory_total_bytes=25_757_220_864, memory_visible_bytes=25_386_352_640,
    compute_capability="8.9", driver="580.95.05", cuda="13.0", mig=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are tried on a copy of conf/."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)


def outlook(settings: Settings, capability: str = "8.9") -> ProfileOutlook:
    cards = [RTX_4090.model_copy(update={"compute_capability": capability})]
    gpus = cards if settings.device.kind == "cuda" else []
    machine = sample_results.environment().model_copy(update={"gpus": gpus, "cpu_flags": ["avx2"]})
    return ProfileOutlook(settings, geometry_of(settings), machine, {})


def rungs_of(settings: Settings, failed: str, capability: str = "8.9", **bad: Decision) -> dict[str, Rung]:
    ways = ways_of(settings)
    known = [Known(name, way, *2 * (bad.get(name, "GO"),)) for name, way in ways.items() if name != failed]
    own = Known(failed, ways[failed], "NO-GO", "NO-GO")
    found = ladder(own, [own, *known], outlook(settings, capability))
    return {rung.change: rung for rung in found}


def test_fp8_at_scale_one_on_the_card() -> None:
    found = rungs_of(load_settings(["profile=rtx4090"]), "awq-fp8kv")
    told = [(rung.sequences, rung.max_model_len, rung.enough, rung.variant) for rung in found.values()]
    # What `quantgate plan` says of these variants; 24 layers at one byte and 4 at two cost 8/7 of the room: 70 / (8/7) = 61.
    assert told == [
        (70, 8192, True, "awq-fp8kv-calibrated"),
        (68, 8192, True, "awq-kv-per-token-head"),
        (61, 8192, True, None),
        (60, 4848, True, None),
    ]


def test_a_card_before_ada_has_no_fp8_units() -> None:
    settings = load_settings(["profile=rtx4090"])
    assert "FP8 KV with a scale per token and head" not in rungs_of(settings, "awq-fp8kv", "8.6")
    assert "FP8 weights (W8A8)" not in rungs_of(settings, "awq", "8.6")
    assert rungs_of(settings, "awq")["FP8 weights (W8A8)"].sequences == 28


def test_a_cpu_is_offered_what_it_can() -> None:
    found = rungs_of(load_settings(["profile=demo"]), "awq-fp8kv")
    assert list(found) == ["FP8 KV at calibrated scales", "BF16 KV at a shorter max_model_len"]
    command = found["FP8 KV at calibrated scales"].command or ""
    assert "`awq-lc-kv: llmcompressor-g64-kv` to quantizer_names" in command
    assert "`awq-fp8kv-calibrated` to variant_names" in command


def test_groups_that_divide_nothing_are_not_offered() -> None:
    """SmolLM2's width of 576 is no multiple of 128, so from 128 there is nothing to come down from; 32 divides."""
    found = rungs_of(load_settings(["profile=demo"]), "awq")
    assert "group size 32" in found and "group size 64" not in found


def promised(rung: Rung, failed: Way, layers: int) -> tuple[int, str, str | None, frozenset[int]]:
    """(bits, cache, scales, skipped layers) that a rung's words mean."""
    ends = frozenset({0, 1, layers - 2, layers - 1})
    bits, kv, scales, skipped = failed.bits, failed.kv, failed.scales, failed.skipped
    if rung.change == "FP8 KV at calibrated scales":
        return bits, "fp8", "checkpoint", frozenset()
    if rung.change == "FP8 KV with a scale per token and head":
        return bits, "fp8_per_token_head", None, frozenset()
    if rung.change.startswith("BF16 KV"):
        return bits, "bfloat16", None, frozenset()
    if rung.change == "first and last 2 layers' KV at 16 bits":
        return bits, kv, None if kv == "fp8_per_token_head" else "checkpoint", ends
    return {"BF16 weights": 16, "FP8 weights (W8A8)": 8}.get(rung.change, bits), kv, scales, skipped


def carry_out(command: str, profile: str) -> None:
    """In this clone's conf/: what DVC does to it for `-S`, or what a person does who reads the sentence."""
    from dvc.utils.hydra import apply_overrides

    if command.startswith("dvc exp run"):
        for word in shlex.split(command)[3:]:
            if word != "-S":
                file, override = re.fullmatch(r"(conf/[^:]+\.yaml):(.+)", word).groups()  # type: ignore[union-attr]
                apply_overrides(file, [override])
        return
    told = re.fullmatch(
        rf"add (?:(?:`(?P<scheme>\S+): (?P<quantizer>\S+)`|a scheme with (?P<recipe>.+)) to quantizer_names and )?"
        rf"(?:`(?P<variant>\S+)`|a variant with (?P<keys>.+)) to variant_names in (?P<file>conf/profile/{profile}\.yaml)"
        rf"(?:, and `(?P<flags>.+)` in conf/variant/(?P=variant)\.yaml)?; then `quantgate use {profile}` and `dvc repro`",
        command,
    )
    assert told, command
    content = yaml.safe_load(Path(told["file"]).read_text())
    scheme, quantizer, variant = told["scheme"], told["quantizer"], told["variant"] or "new"
    if told["recipe"]:
        scheme, quantizer = "that scheme", "new"
        keys = {**flow(told["recipe"]), "clip_search": False, "samples": 64, "sequence_tokens": 256}
        Path("conf/quantizer/new.yaml").write_text(yaml.safe_dump(keys))
    if scheme:
        content["quantizer_names"][scheme.replace(" ", "-")] = quantizer
    file = Path(f"conf/variant/{variant}.yaml")
    keys = yaml.safe_load(file.read_text()) if told["variant"] else {**flow(told["keys"]), "description": "x"}
    keys |= flow(told["flags"]) if told["flags"] else {}
    file.write_text(yaml.safe_dump({**keys, "weights": keys["weights"].replace(" ", "-")}))
    content["variant_names"].append(variant)
    Path(told["file"]).write_text("# @package _global_\n" + yaml.safe_dump(content))


def flow(keys: str) -> dict[str, Any]:
    return dict(yaml.safe_load(f"{{{keys}}}"))


@pytest.mark.parametrize(
    ("profile", "failed"),
    [(p, v) for p in ("rtx4090-full", "demo", "demo-full") for v in ("awq-fp8kv", "bf16-fp8kv", "awq")]
    + [(p, "awq-fp8kv-calibrated") for p in ("rtx4090", "demo-full")]
    + [("rtx4090", "awq-kv-per-token-head"), ("rtx4090", "awq-fp8kv"), ("rtx4090", "awq")],
)
@pytest.mark.parametrize("weights_are_bad", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["shipped", "no-sibling"])
def test_every_command_makes_the_way_that_its_rung_names(
    profile: str, failed: str, weights_are_bad: bool, alone: bool
) -> None:
    """In a copy of conf/ each: the settings must compose, and one variant be served as promised.

    `alone`: the profile has the reference, its control and 16-bit caches beside the failed variant, so nothing can be borrowed.
    """
    if alone:
        file = Path(f"conf/profile/{profile}.yaml")
        content = yaml.safe_load(file.read_text())
        content["variant_names"] = list(dict.fromkeys(["bf16", "bf16-again", "awq", failed]))
        file.write_text("# @package _global_\n" + yaml.safe_dump(content))
    settings = load_settings([f"profile={profile}"])
    ways = ways_of(settings)
    known_bad: dict[str, Decision] = {"awq": "NO-GO"} if weights_are_bad and failed != "awq" else {}
    tried = 0
    for rung in rungs_of(settings, failed, **known_bad).values():
        if rung.command is None:
            continue
        shutil.copytree("conf", "kept")
        carry_out(rung.command, profile)
        changed = load_settings([f"profile={profile}"])
        shutil.rmtree("conf")
        shutil.move("kept", "conf")
        check_engine(changed)  # its flags are known to the locked engine
        assert changed.server.max_model_len == rung.max_model_len
        then = ways_of(changed)
        new = [way for name, way in then.items() if way != ways.get(name)]
        if rung.max_model_len != settings.server.max_model_len:
            assert not new
            new = list(then.values())
        planner = outlook(changed)
        wanted = promised(rung, ways[failed], planner.layers)
        fitting = [way for way in new if (way.bits, way.kv, way.scales, way.skipped) == wanted]
        assert fitting, (rung.change, rung.command)
        assert rung.sequences in {planner.sequences(way, rung.max_model_len) for way in fitting}
        if rung.change in ("4 bits by GPTQ", "FP8 weights (W8A8)"):
            assert {way.method for way in fitting} == {"gptq" if "GPTQ" in rung.change else "fp8"}
        elif " by " in rung.change:
            assert {way.backend for way in fitting} == {rung.change.split()[-1]}
        if rung.change.startswith("group size"):
            assert {way.group_size for way in fitting} == {int(rung.change.split()[-1])}
        if "calibration sequences" in rung.change:
            assert {way.samples for way in fitting} == {int(rung.change.split()[0])}
        tried += 1
    assert tried


def test_scales_for_16_bit_weights_are_named_by_the_shipped_files() -> None:
    """And what such a checkpoint can't have, another cache, is offered on plain weights."""
    rung = "FP8 KV at calibrated scales"
    assert (
        rungs_of(load_settings(["profile=rtx4090-full"]), "bf16-fp8kv")[rung].variant
        == "bf16-fp8kv-calibrated"
    )
    command = rungs_of(load_settings(["profile=demo"]), "bf16-fp8kv")[rung].command
    assert (
        command
        and "add `bf16-kv: llmcompressor-kv` to quantizer_names and `bf16-fp8kv-calibrated`" in command
    )
    carry_out(command, "demo")
    settings = load_settings(["profile=rtx4090"])
    assert way_of(settings, settings.variants["bf16-fp8kv-calibrated"]).bits == 16
    found = rungs_of(settings, "bf16-fp8kv-calibrated")
    per_token = found["FP8 KV with a scale per token and head"].command
    assert per_token and "a variant with weights: bf16, kv_cache_dtype: fp8_per_token_head to" in per_token
    outer = found["first and last 2 layers' KV at 16 bits"].command
    assert outer and outer.startswith("dvc exp run -S 'conf/variant/bf16-fp8kv-calibrated.yaml:+engine_args=")


def test_flags_that_a_variant_has_are_kept() -> None:
    """A pinned attention backend, beside the layers that are left at 16 bits."""
    file = Path("conf/variant/awq-fp8kv-calibrated.yaml")
    file.write_text(file.read_text() + "engine_args: [--attention-backend, FLASHINFER]\n")
    command = rungs_of(load_settings(["profile=rtx4090"]), "awq-fp8kv")[
        "first and last 2 layers' KV at 16 bits"
    ].command
    assert command
    carry_out(command, "rtx4090")
    variant = load_settings(["profile=rtx4090"]).variants["awq-fp8kv-calibrated"]
    assert (variant.attention_backend, variant.skipped_layers) == ("FLASHINFER", {0, 1, 26, 27})
