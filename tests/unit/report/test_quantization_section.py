"""The table of proofs: what a checkpoint has beside its weights, and what it hasn't."""

from __future__ import annotations

from pipeline.report.sections.quantization import proof_table
from pipeline.report.table import Cell
from pipeline.report.wording import NOT_MEASURED
from tests.support.sample_results import kv_scales, quantization


def rows() -> dict[str, tuple[Cell, Cell]]:
    """Of a scheme without KV scales and one with some."""
    scaled = quantization("awq-lc-kv", "llmcompressor").model_copy(update={"kv_scales": kv_scales()})
    table = proof_table({"awq": quantization(), "awq-lc-kv": scaled})
    return {label.text: (first, second) for label, first, second in table.rows}


def test_kv_scales_are_shown_with_what_they_cover() -> None:
    found = rows()
    assert found["FP8 KV scales"][1].text == "30 layers"
    assert found["FP8 KV scales"][1].note == "keys 0.0372 to 0.118, values 0.0041 to 0.0513"
    assert found["Range of the KV scales"][1].text == "0.83 to 1.31"
    saturated = found["Saturated keys or values"][1]
    assert saturated.text == "0.042\u00a0%" and saturated.note.startswith(
        "model.layers.7.self_attn.v_scale, limit 0.5"
    )
    assert found["Largest key and value"][1].text == "52.6 and 21.9"


def test_no_scales_are_none_and_nothing_is_measured_of_them() -> None:
    found = rows()
    assert found["FP8 KV scales"][0].text == "none"
    for label in ("Range of the KV scales", "Saturated keys or values", "Largest key and value"):
        assert (found[label][0].text, found[label][0].kind) == (NOT_MEASURED, "missing")


def test_scales_alone_are_no_search() -> None:
    alone = quantization().model_copy(update={"bits": 16, "group_size": None, "kv_scales": kv_scales()})
    (cell,) = (row[1] for row in proof_table({"bf16-kv": alone}).rows if row[0].text == "Search")
    assert cell.text == "none"


def test_each_method_says_what_it_did_and_what_it_read() -> None:
    sample = quantization("fp8-kv", "llmcompressor")
    fp8 = sample.model_copy(
        update={
            "bits": 8, "group_size": None, "zero_point": None, "activations": "float8_e4m3fn", "calibration": None,
            "kv_calibration": sample.calibration, "recipe": {"method": "fp8"},
        }
    )  # fmt: skip
    gptq = quantization("gptq").model_copy(update={"recipe": {"method": "gptq", "clip_search": False}})
    found = {row[0].text: (row[1], row[2]) for row in proof_table({"fp8-kv": fp8, "gptq": gptq}).rows}
    assert found["Checkpoint"][0].text == "8 bit, a scale per output, activations rounded too"
    assert found["Checkpoint"][1].text == "4 bit, groups of 64, with zero points"
    assert [cell.text for cell in found["Search"]] == ["none", "rounding errors made up for (GPTQ)"]
    assert [cell.text for cell in found["Calibration"]] == ["none", "1,024 tokens"]
    assert [cell.text for cell in found["Calibration of the KV scales"]] == ["1,024 tokens", "none"]


def test_what_is_left_unquantized_is_listed_layers_alike_together() -> None:
    left = {f"model.layers.{layer}.mlp.gate": "bfloat16" for layer in range(48)}
    left |= {"lm_head": "bfloat16", "model.embed_tokens": "bfloat16"}
    table = proof_table({"moe": quantization().model_copy(update={"unquantized_modules": left})})
    (cell,) = (row[1] for row in table.rows if row[0].text == "Left as they are")
    assert cell.text == "50 matrices"
    assert (
        cell.note
        == "48 x model.layers.*.mlp.gate (bfloat16), 1 x lm_head (bfloat16), 1 x model.embed_tokens (bfloat16)"
    )
    named = rows()["Left as they are"][0]
    assert (named.text, named.note) == ("lm_head, model.embed_tokens", "shares model.embed_tokens, bfloat16")
