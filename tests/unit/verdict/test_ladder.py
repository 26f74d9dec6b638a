"""The rescue ladder on plain numbers: what is blamed, which rungs come in which order, what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.results import Decision, Gate, Rung
from pipeline.verdict.ladder import Known, Way, blamed, ladder, quality_decision, with_ladders
from tests.unit.verdict.test_decide import verdict as sample_verdict

AWQ = Way("awq", 4, "bfloat16", backend="autoawq", group_size=128, samples=64, method="awq")
AWQ_ONE = replace(AWQ, kv="fp8", scales="one")
CALIBRATED = replace(AWQ, weights="lc", kv="fp8", scales="checkpoint", backend="llmcompressor")
PER_TOKEN = replace(AWQ, kv="fp8_per_token_head")
BF16 = Way("bf16", 16, "bfloat16")
BF16_ONE = Way("bf16", 16, "fp8", "one")


class Plain:
    """60 are wanted at 8,192 tokens of a 28-layer model; 8-bit caches hold 66, 16-bit ones 33 and 60 at half the length."""

    required, max_model_len, layers = 60, 8192, 28
    backends: Sequence[str] = ("autoawq", "llmcompressor")

    def __init__(self, refused: Sequence[str] = (), fp8_weights: bool = True) -> None:
        self.refused, self.fp8_weights = refused, fp8_weights

    def sequences(self, way: Way, max_model_len: int) -> int | None:
        fits = 66 if way.quantized_kv else 33
        return fits * self.max_model_len // max_model_len

    def longest(self, way: Way) -> int | None:
        return 4096

    def refusal(self, way: Way) -> str | None:
        return "not here" if way.kv in self.refused or way.backend in self.refused else None

    def command(self, way: Way, failed: str, max_model_len: int) -> str | None:
        return f"try {way.kv} at {max_model_len}"


def known(name: str, way: Way, quality: Decision = "GO", decision: Decision | None = None) -> Known:
    return Known(name, way, decision or quality, quality)


def changes(rungs: Sequence[Rung]) -> list[str]:
    return [rung.change for rung in rungs]


KV_CHANGES = [
    "FP8 KV at calibrated scales",
    "FP8 KV with a scale per token and head",
    "first and last 2 layers' KV at 16 bits",
    "BF16 KV at a shorter max_model_len",
]


@pytest.mark.parametrize(("failed", "first"), [(AWQ_ONE, 0), (CALIBRATED, 1), (PER_TOKEN, 2), (BF16_ONE, 0)])
def test_the_cache_s_rungs_go_on_from_where_the_failed_one_stands(failed: Way, first: int) -> None:
    own = known("x", failed, "NO-GO")
    rungs = ladder(own, [own, known("awq", AWQ)], Plain())
    assert changes(rungs) == KV_CHANGES[first:]
    assert all(rung.enough for rung in rungs)
    assert (rungs[-1].max_model_len, rungs[-1].sequences) == (4096, 66)
    assert all(rung.why and rung.command for rung in rungs)


def test_what_was_skipped_already_leaves_the_cache_at_16_bits() -> None:
    skipped = Way("awq", 4, "fp8", "one", frozenset({0, 27}), "autoawq", 128, 64)
    own = known("x", skipped, "NO-GO")
    assert changes(ladder(own, [own, known("awq", AWQ)], Plain())) == KV_CHANGES[3:]


def test_a_rung_that_the_profile_runs_is_named_with_its_verdict() -> None:
    own = known("awq-fp8kv", AWQ_ONE, "NO-GO")
    others = [
        known("awq", AWQ),
        known("cal", CALIBRATED, "NO-GO"),
        known("pth", PER_TOKEN, "GO", "INCONCLUSIVE"),
    ]
    rungs = ladder(own, [own, *others], Plain())
    assert [(rung.variant, rung.decision) for rung in rungs] == [
        ("cal", "NO-GO"), ("pth", "INCONCLUSIVE"), (None, None), (None, None),
    ]  # fmt: skip
    assert [rung.command is None for rung in rungs] == [True, True, False, False]


def test_a_16_bit_cache_that_is_enough_needs_no_shorter_length() -> None:
    class Roomy(Plain):
        required = 30

    own = known("x", AWQ_ONE, "NO-GO")
    last = ladder(own, [own, known("awq", AWQ)], Roomy())[-1]
    assert (last.change, last.max_model_len, last.variant) == ("BF16 KV", 8192, "awq")


def test_what_cannot_be_done_here_is_left_out() -> None:
    own = known("x", AWQ_ONE, "NO-GO")
    without = ladder(own, [own, known("awq", AWQ)], Plain(refused=["fp8_per_token_head"]))
    assert changes(without) == [KV_CHANGES[0], *KV_CHANGES[2:]]

    class Nowhere(Plain):
        def longest(self, way: Way) -> int | None:
            return None

    assert KV_CHANGES[3] not in changes(ladder(own, [own, known("awq", AWQ)], Nowhere()))


def test_the_weights_rungs() -> None:
    own = known("awq", AWQ, "NO-GO")
    rungs = ladder(own, [known("bf16", BF16), own], Plain())
    assert changes(rungs) == [
        "the same format by llmcompressor", "4 bits by GPTQ", "group size 64", "group size 32",
        "128 calibration sequences instead of 64", "FP8 weights (W8A8)", "BF16 weights",
    ]  # fmt: skip
    assert all(rung.command for rung in rungs[:-1])
    assert rungs[-1].variant == "bf16"
    few = ladder(own, [own], Plain(refused=["llmcompressor"], fp8_weights=False))
    assert changes(few)[0] == "group size 64" and "FP8 weights (W8A8)" not in changes(few)


def test_gptq_is_not_offered_another_gptq_and_fp8_has_nothing_to_search() -> None:
    gptq = replace(AWQ, weights="gptq", backend="llmcompressor", method="gptq")
    own = known("gptq", gptq, "NO-GO")
    # AutoAWQ makes no GPTQ; what the profile runs of the next rungs is named only where it is made the same way.
    found = ladder(own, [known("bf16", BF16), known("awq", AWQ), own], Plain())
    assert changes(found)[0] == "group size 64" and "4 bits by GPTQ" not in changes(found)
    assert {rung.variant for rung in found[:-1]} == {None}
    fp8 = Way("fp8", 8, "bfloat16", backend="llmcompressor", method="fp8")
    own = known("fp8", fp8, "NO-GO")
    assert changes(ladder(own, [known("bf16", BF16), own], Plain())) == ["BF16 weights"]
    offered = ladder(
        known("awq", AWQ, "NO-GO"), [known("bf16", BF16), known("fp8", fp8), known("gptq", gptq)], Plain()
    )
    named = {rung.change: rung.variant for rung in offered}
    assert (named["FP8 weights (W8A8)"], named["4 bits by GPTQ"]) == ("fp8", "gptq")


@pytest.mark.parametrize(
    ("failed", "sibling", "expected"),
    [
        (AWQ_ONE, "GO", ["kv"]),
        (AWQ_ONE, "INCONCLUSIVE", ["kv"]),
        (AWQ_ONE, "NO-GO", ["weights", "kv"]),
        (CALIBRATED, "NO-GO", ["weights", "kv"]),  # its own weights have no 16-bit variant, another's have
        (AWQ_ONE, None, ["kv", "weights"]),
        (AWQ, None, ["weights"]),
        (BF16_ONE, None, ["kv"]),
        (BF16, None, []),
    ],
)
def test_blame_follows_the_same_weights_with_a_16_bit_cache(
    failed: Way, sibling: Decision | None, expected: list[str]
) -> None:
    own = known("x", failed, "NO-GO")
    others = [] if sibling is None else [known("awq", AWQ, sibling)]
    assert blamed(own, [own, known("bf16", BF16), *others]) == expected


def test_only_quality_asks_for_a_ladder() -> None:
    """A variant that doesn't fit needs more room, not other scales."""
    found = sample_verdict()
    bad = Gate(name="quality", decision="NO-GO", value=-0.1, limit=-0.05, unit="accuracy", why="")
    name = "awq-fp8kv"
    gates = [
        gate for gate in found.variants[name].gates if not gate.name.startswith(("quality", "divergence"))
    ]
    variants = found.variants | {
        name: found.variants[name].model_copy(update={"gates": [*gates, bad], "decision": "NO-GO"})
    }
    ways = {"bf16": BF16, "bf16-again": BF16, "bf16-fp8kv": BF16_ONE, "awq": AWQ, name: AWQ_ONE}
    shown = with_ladders(variants, ways, Plain())
    assert changes(shown[name].rescue) == KV_CHANGES
    for other, one in shown.items():
        if other != name:
            assert quality_decision(one) != "NO-GO" and one.rescue == []
    shadow = bad.model_copy(update={"gating": False})
    assert quality_decision(variants[name].model_copy(update={"gates": [*gates, shadow]})) == "INCONCLUSIVE"
