"""The ladder of the shipped profiles: the planner's numbers, and commands that do what they say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from pipeline.planning.rescue import ProfileOutlook, way_of, ways_of
from pipeline.planning.scenario import geometry_of
from pipeline.results import Decision, Gpu, Rung
from pipeline.serving.engine import check_engine
from pipeline.settings import Settings, load_settings
from pipeline.verdict.ladder import Known, ladder
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
    # What `quantgate plan` says of these variants; 24 layers at one byte and 4 at two cost 8/7 of the room: 69 / (8/7) = 60.
    assert told == [
        (69, 8192, True, "awq-fp8kv-calibrated"),
        (66, 8192, True, "awq-kv-per-token-head"),
        (60, 8192, True, None),
        (60, 4704, True, None),
    ]


def test_a_card_before_ada_has_no_fp8_units() -> None:
    settings = load_settings(["profile=rtx4090"])
    assert "FP8 KV with a scale per token and head" not in rungs_of(settings, "awq-fp8kv", "8.6")
    assert "FP8 weights (W8A8)" not in rungs_of(settings, "awq", "8.6")
    assert rungs_of(settings, "awq")["FP8 weights (W8A8)"].sequences == 27


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


@pytest.mark.parametrize(
    ("profile", "failed"),
    [(p, v) for p in ("rtx4090", "demo") for v in ("awq-fp8kv", "bf16-fp8kv", "awq")]
    + [("rtx4090", "awq-fp8kv-calibrated"), ("rtx4090", "awq-kv-per-token-head")],
)
def test_every_command_makes_the_way_that_its_rung_names(profile: str, failed: str) -> None:
    """As DVC applies `-S`, in a copy of conf/ each: the settings must compose, and one variant be served as promised."""
    from dvc.utils.hydra import apply_overrides

    settings = load_settings([f"profile={profile}"])
    before = set(ways_of(settings).values())
    tried = 0
    for rung in rungs_of(settings, failed).values():
        if rung.command is None or not rung.command.startswith("dvc exp run"):
            continue
        words = shlex.split(rung.command)[3:]
        shutil.copytree("conf", "kept")
        for word in (word for word in words if word != "-S"):
            file, override = re.fullmatch(r"(conf/[^:]+\.yaml):(.+)", word).groups()  # type: ignore[union-attr]
            apply_overrides(file, [override])
        changed = load_settings([f"profile={profile}"])
        shutil.rmtree("conf")
        shutil.move("kept", "conf")
        check_engine(changed)  # its flags are known to the locked engine
        assert changed.server.max_model_len == rung.max_model_len
        new = {way_of(changed, variant) for variant in changed.variants.values()} - before
        if rung.max_model_len == settings.server.max_model_len:
            assert new, rung.command
            planner = outlook(changed)
            assert rung.sequences in {planner.sequences(way, rung.max_model_len) for way in new}
        tried += 1
    assert tried or profile == "demo"
