"""Predicted against reported: the term that is off is named, and rounding of the log is not an error."""

from __future__ import annotations

from dataclasses import replace

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


def test_the_term_that_is_off_is_named_and_nothing_is_settled_by_a_band_that_nobody_measured() -> None:
    residuals = reconcile(PLANNED, {"model_loading_gib": 14.1, "activation_gib": 3.5, "cuda_graphs_gib": 1.1})
    found = explain_mismatch(1000, (900, 1100), 500, residuals)
    assert found is not None and not found.settled
    assert "500 KV tokens where 900 to 1,100 were predicted" in found.text
    assert (
        "off is activation: 3.50 GiB reported, 0.50 to 2.00 GiB planned (computed, not measured" in found.text
    )
    assert found.text.endswith(
        "cuda_graphs: 1.10 GiB reported, 0.25 to 1.00 GiB planned (computed, not measured on this card)"
    )


def test_what_was_measured_on_this_card_or_is_exact_settles_it() -> None:
    measured = [replace(term, runs=3) for term in PLANNED]
    found = explain_mismatch(1000, (900, 1100), 500, reconcile(measured, {"activation_gib": 3.5}))
    assert found is not None and found.settled
    assert found.text.endswith("off is activation: 3.50 GiB reported, 0.50 to 2.00 GiB planned")
    one = [replace(term, runs=0 if term.name == "cuda_graphs" else 3) for term in PLANNED]
    both = reconcile(one, {"activation_gib": 3.5, "cuda_graphs_gib": 1.1})
    found = explain_mismatch(1000, (900, 1100), 500, both)
    assert found is not None and not found.settled, "one of them was never measured"
    found = explain_mismatch(1000, (900, 1100), 500, both[:-1])
    assert found is not None and found.settled


def test_without_any_term_the_uncertain_ones_or_kappa_are_blamed() -> None:
    exact = [Term.exact("weights", GIB), Term.exact("emulated", GIB)]
    found = explain_mismatch(1000, (1000, 1000), 999, reconcile(exact, {}))
    assert found is not None and found.settled
    assert "where 1,000 were predicted" in found.text
    assert "says nothing of its memory terms, so off is kappa" in found.text
    found = explain_mismatch(1000, (900, 1100), 1200, reconcile(PLANNED, {}))
    assert found is not None and not found.settled and "activation" in found.text
    inside = explain_mismatch(1000, (900, 1100), 1200, reconcile(PLANNED, {"activation_gib": 1.0}))
    assert inside is not None and not inside.settled
    assert "each term that it logs is within its band, together" in inside.text
    measured = [replace(term, runs=1) for term in PLANNED]
    inside = explain_mismatch(1000, (900, 1100), 1200, reconcile(measured, {"activation_gib": 1.0}))
    assert inside is not None and inside.settled and "every memory term it logs" in inside.text


def test_tokens_that_the_reported_memory_doesnt_make_are_no_matter_of_bands() -> None:
    off = reconcile(PLANNED, {"activation_gib": 3.5})
    found = explain_mismatch(1000, (900, 1100), 500, off, budget_gib=(10.0, 10.0))
    assert found is not None and found.settled
    assert "which its own 10.00 GiB don't make: kappa or the block size is off" in found.text
    found = explain_mismatch(1000, (900, 1100), 500, off, budget_gib=(10.0, 5.0))
    assert found is not None and not found.settled


def test_what_no_log_names_is_taken_out_of_the_term_that_holds_it() -> None:
    planned = [*PLANNED, Term.exact("sampler", GIB // 4)]
    consumed = {
        one.name: one for one in reconcile(planned, {"model_loading_gib": 14.1, "consumed_gib": 14.85})
    }
    assert consumed["non_torch"].reported == pytest.approx(GIB // 2, abs=GIB // 500)
    assert consumed["sampler"].reported is None and "in the consumed memory" in consumed["sampler"].note
    peak = {one.name: one for one in reconcile(planned, {"weights_gib": 14.1, "activation_gib": 1.25})}
    assert peak["activation"].reported == pytest.approx(GIB, abs=2)


def test_an_eager_start_without_graphs_agrees_with_a_plan_of_none() -> None:
    [*_, found] = reconcile([*PLANNED[:-1], Term("cuda_graphs", 0, 0, 0)], {"cuda_graphs_gib": 0.0})
    assert (found.name, found.within, found.term.certain) == ("cuda_graphs", True, True)
