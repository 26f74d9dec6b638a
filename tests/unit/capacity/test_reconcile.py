"""Predicted against reported: the term that is off is named, and rounding of the log is not an error."""

from __future__ import annotations

import pytest

from pipeline.capacity import GIB, Card, Term
from pipeline.capacity.reconcile import explain_mismatch, planned_terms, reconcile

CARD = Card(
    24 * GIB,
    0.9,
    (
        Term("buffers", GIB // 10, 0, GIB // 5),
        Term("activation", GIB, GIB // 2, 2 * GIB),
        Term("non_torch", GIB // 2, 0, GIB),
        Term("cuda_graphs", GIB // 2, GIB // 4, GIB),
    ),
)
PLANNED = planned_terms(CARD, 14 * GIB)


def found(**memory: float) -> dict[str, tuple[bool | None, float | None]]:
    residuals = reconcile(PLANNED, memory)
    return {
        item.name: (item.within, None if item.reported is None else item.reported / GIB) for item in residuals
    }


def test_what_the_log_doesnt_say_stays_open() -> None:
    assert found() == {name: (None, None) for name in ("weights", "non_torch", "activation", "cuda_graphs")}


def test_loaded_weights_include_the_buffers_and_rounding_is_allowed() -> None:
    assert found(model_loading_gib=14.2)["weights"][0] is True
    assert found(model_loading_gib=14.204)["weights"][0] is True
    assert found(model_loading_gib=14.21)["weights"][0] is False
    assert found(model_loading_gib=13.98)["weights"][0] is False


def test_consumed_memory_is_split_by_the_loaded_model() -> None:
    residuals = found(model_loading_gib=14.1, consumed_gib=14.6)
    assert residuals["non_torch"][1] == pytest.approx(0.5, abs=1e-6)
    assert found(consumed_gib=14.6)["non_torch"] == (None, None)


def test_within_the_band_there_is_nothing_to_explain() -> None:
    assert explain_mismatch(1000, (900, 1100), 1100, reconcile(PLANNED, {})) is None


def test_the_term_that_is_off_is_named() -> None:
    residuals = reconcile(PLANNED, {"model_loading_gib": 14.1, "activation_gib": 3.5, "cuda_graphs_gib": 1.1})
    text = explain_mismatch(1000, (900, 1100), 500, residuals)
    assert text is not None
    assert "500 KV tokens where 900 to 1,100 were predicted" in text
    assert "off is activation: 3.50 GiB reported, 0.50 to 2.00 GiB planned" in text


def test_without_any_term_kappa_or_the_budget_is_blamed() -> None:
    exact = explain_mismatch(1000, (1000, 1000), 999, reconcile(PLANNED, {}))
    assert exact is not None
    assert "where 1,000 were predicted" in exact
    assert "says nothing of its memory terms" in exact
    inside = explain_mismatch(1000, (900, 1100), 1200, reconcile(PLANNED, {"activation_gib": 1.0}))
    assert inside is not None
    assert "every memory term it logs is within its band" in inside


def test_the_samplers_state_is_in_what_the_log_calls_consumed() -> None:
    with_sampler = [*PLANNED, Term("sampler", GIB // 8, GIB // 8, GIB // 8)]
    residual = {item.name: item for item in reconcile(with_sampler, {})}
    assert "sampler" not in residual
    assert residual["non_torch"].predicted == GIB // 2 + GIB // 8


def test_only_exact_terms_and_those_measured_on_the_card_are_calibrated() -> None:
    measured = Term("activation", 2, 1, 3, calibrated=True)
    by_name = {item.name: item.calibrated for item in reconcile([PLANNED[0], measured, PLANNED[-1]], {})}
    assert by_name == {"weights": True, "activation": True, "cuda_graphs": False}
