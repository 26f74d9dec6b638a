"""What the results say: the few conclusions that every form of the report shares."""

from __future__ import annotations

from pipeline.report.bundle import ResultBundle
from pipeline.report.cards import card_warnings
from pipeline.report.wording import listing, mebibytes, sentence
from pipeline.results import Capacity, Gate, VariantVerdict, Verdict


def why(result: VariantVerdict) -> str:
    """One sentence: the gate that stopped the variant, or what carried it through."""
    gating = [gate for gate in result.gates if gate.gating]
    for decision in ("NO-GO", "INCONCLUSIVE"):
        stopping = [gate for gate in gating if gate.decision == decision]
        if stopping:
            others = [gate.name for gate in stopping[1:]]
            also = f" (also {decision}: {listing(others)})" if others else ""
            return sentence(_reason(stopping[0]) + also)
    if not gating:
        return "No gate ran."
    last = next((gate for gate in gating if gate.name == "quality"), gating[-1])
    return sentence(f"All {len(gating)} gates passed; {_reason(last)}")


def _reason(gate: Gate) -> str:
    reason = gate.why.strip().rstrip(".") or "no reason was recorded"
    return reason if reason.lower().startswith(gate.name.lower()) else f"{gate.name}: {reason}"


def headline(verdict: Verdict) -> str:
    """The answer in one line: which variants are GO."""
    passed = [name for name, result in verdict.variants.items() if result.decision == "GO"]
    open_ones = [name for name, result in verdict.variants.items() if result.decision == "INCONCLUSIVE"]
    if passed:
        return f"{listing(passed)} {'is' if len(passed) == 1 else 'are'} GO"
    if open_ones:
        return f"No variant is GO; {listing(open_ones)} {'is' if len(open_ones) == 1 else 'are'} undecided"
    return "No variant is GO"


def fitting_sequences(capacity: Capacity | None) -> int | None:
    """Whole sequences that fit in the pool that the engine reported; None where there is none."""
    return None if capacity is None else capacity.reported_fitting_sequences


def required_sequences(verdict: Verdict) -> int | None:
    """What the capacity gate asks for, where one ran."""
    for result in verdict.variants.values():
        for gate in result.gates:
            if gate.name == "capacity" and gate.limit is not None:
                return int(gate.limit)
    return None


def emulated_parts(result: VariantVerdict) -> list[str]:
    """Parts that the CPU plugin computed for this variant."""
    return list(result.provenance.emulated) if result.provenance else []


def is_emulated(result: VariantVerdict) -> bool:
    """True when this variant's speed is that of an emulated kernel. An emulated memory budget is said of the device."""
    return bool(emulated_parts(result))


def control_summary(verdict: Verdict) -> str:
    """The noise floor in one sentence, for beside the deltas."""
    if verdict.control is None:
        return "No A/A control ran, so the noise floor is unknown."
    delta = verdict.variants[verdict.control].quality if verdict.control in verdict.variants else None
    if delta is None or delta.flips is None or delta.n is None:
        return f"The A/A control {verdict.control} was not measured, so the noise floor is unknown."
    changed = "" if delta.changed_answers is None else f" and changed its answer on {delta.changed_answers}"
    return (
        f"The A/A control {verdict.control} (the reference run twice) flipped {delta.flips} of {delta.n} items"
        f"{changed}: that is the noise floor."
    )


def _why_plugin(bundle: ResultBundle) -> str:
    """Words for a sentence; empty where the results don't say."""
    found = [result.provenance.kernels for result in bundle.verdict.variants.values() if result.provenance]
    reasons = {choice.why for kernels in found for choice in kernels.values() if choice.taken == "plugin"}
    words = {
        "need": "because this processor has no stock kernel for it",
        "setting": "as the device's settings ask",
        "comparison": "which was the faster in a comparison on this machine",
    }
    said = [text for reason, text in words.items() if reason in reasons]
    return f", {listing(said)}" if said else ""


def warnings(bundle: ResultBundle) -> list[tuple[str, str]]:
    """(title, text) of what a reader must know before any number: emulated memory, emulated kernels, a card that was disturbed."""
    plan, verdict = bundle.plan, bundle.verdict
    found: list[tuple[str, str]] = []
    if plan.device_emulated:
        found.append(
            (
                "Emulated memory budget",
                f"“{plan.device}” is not a card. Its {mebibytes(plan.device_memory_bytes)} are a memory budget chosen "
                "for this profile: capacity figures are exact for that budget and say nothing about a real card, "
                "and speed is that of this machine's processor.",
            )
        )
    emulated = [name for name in bundle.variants if is_emulated(verdict.variants[name])]
    if emulated:
        parts = sorted({part for name in emulated for part in emulated_parts(verdict.variants[name])})
        found.append(
            (
                "Emulated kernels",
                f"{listing(emulated)} ran {listing(parts) or 'parts'} on the CPU plugin{_why_plugin(bundle)}. The numbers it "
                "computes are real, so capacity and quality count; its speed is that of the emulation, not of the engine's own "
                "kernels, and is marked “emulated kernel”.",
            )
        )
    found += card_warnings(bundle)
    return found
