"""The gates: each one rule, from results to a `Gate` with its threshold, what was found, and why.

A gate has three answers. NO-GO says the variant is known to fail the rule; INCONCLUSIVE says the evidence can't tell, which
includes evidence that contradicts itself or isn't there; GO is never given for lack of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.results import Decision, Gate, Measurement, Provenance
from pipeline.verdict.policy import Policy, VariantIntent
from pipeline.verdict.rule import Rule

UNMEASURED = "the load was not measured"


def capacity_gate(measurement: Measurement | None, policy: Policy) -> Gate:
    """Do the required sequences fit at full length, by the engine's own block count?"""
    required = policy.required_sequences
    rule = Rule("capacity", required, "sequences")
    if measurement is None:
        return rule.cannot_run(UNMEASURED)
    fitting = measurement.capacity.reported_fitting_sequences
    if fitting is None:
        return rule.cannot_run("the engine's pool size is not known")
    found = f"{fitting} whole sequences of {measurement.capacity.max_model_len} tokens fit beside the engine's null block"
    if fitting >= required:
        return rule.says("GO", fitting, f"{found}, {required} are required")
    return rule.says("NO-GO", fitting, f"only {found}, {required} are required")


def capacity_agreement_gate(measurement: Measurement | None) -> Gate:
    """Did the arithmetic predict the engine's pool: to the token where nothing has a band, else within it?

    A disagreement is INCONCLUSIVE, not NO-GO: one of the two numbers is wrong, and until it is known which, neither the
    plan nor the capacity gate can be believed.
    """
    rule = Rule("capacity-agreement", 0, "tokens")
    if measurement is None:
        return rule.cannot_run(UNMEASURED)
    predicted, reported = measurement.capacity.predicted_tokens, measurement.capacity.reported_tokens
    if predicted is None or reported is None:
        return rule.cannot_run(f"the {'predicted' if predicted is None else 'reported'} pool size is missing")
    difference = reported - predicted
    if difference == 0:
        return rule.says("GO", 0, f"the engine reports the {reported} tokens that were predicted")
    low, high = measurement.capacity.predicted_tokens_band or (predicted, predicted)
    if low <= reported <= high:
        return rule.says(
            "GO", difference, f"the engine reports {reported} tokens, within the planned {low} to {high}"
        )
    if measurement.capacity.disagreement is not None:
        why = (
            f"{measurement.capacity.disagreement}; no run on this card has measured that band: `quantgate calibrate` takes this run's "
            "figures into it"
        )
        return rule.cannot_run(why, difference)
    blocks = difference / measurement.capacity.block_size
    why = (
        f"the engine reports {reported} tokens where {predicted} were predicted ({blocks:+g} blocks): "
        "one of them is wrong, so no capacity figure can be trusted"
    )
    return rule.cannot_run(why, difference)


def load_completed_gate(measurement: Measurement | None, policy: Policy) -> Gate:
    """Did the engine answer the requests it was given?"""
    rule = Rule("load-completed", policy.minimum_completed, "share of requests")
    if measurement is None:
        return rule.cannot_run(UNMEASURED)
    levels, probes = measurement.levels, [probe for search in measurement.searches for probe in search.probes]
    requests = sum(level.requests for level in levels) + sum(probe.requests for probe in probes)
    if requests == 0:
        return rule.cannot_run("no request was sent")
    completed, failed = sum(level.completed for level in levels), sum(level.failed for level in levels)
    stopped = sum(level.stopped for level in levels)
    if completed + failed + stopped != sum(level.requests for level in levels):
        return rule.cannot_run(
            f"of {requests} requests {completed} completed and {failed} failed: the count is off"
        )
    failed += sum(probe.failed for probe in probes)
    share = 1 - failed / requests
    if not failed:
        concurrencies = ", ".join(str(level.concurrency) for level in levels)
        also = f" and in {len(probes)} probes" if probes else ""
        return rule.says(
            "GO", share, f"none of {requests} requests failed, at concurrency {concurrencies}{also}"
        )
    where = [f"{level.failed} at concurrency {level.concurrency}" for level in levels if level.failed]
    where += [f"{probe.failed} in the probe {probe.cell}" for probe in probes if probe.failed]
    decision: Decision = "GO" if share >= policy.minimum_completed else "NO-GO"
    return rule.says(decision, share, f"{failed} of {requests} requests failed: {', '.join(where)}")


def concurrency_observed_gate(measurement: Measurement | None, policy: Policy) -> Gate:
    """Were the required sequences seen running at once when at least so many were asked for?

    Fewer although more fit is INCONCLUSIVE (a limit of the scheduler, a level too short for the sampler, or a wrong
    capacity figure); fewer because fewer fit confirms the capacity gate's NO-GO.
    """
    required = policy.required_sequences
    rule = Rule("concurrency-observed", required, "sequences")
    if measurement is None:
        return rule.cannot_run(UNMEASURED)
    fitting = measurement.capacity.reported_fitting_sequences
    if (
        fill := measurement.fill
    ) is not None:  # full-length sequences; a level's may be shorter, and prove less
        most, peaks = fill.offered, [fill.observed_peak_running]
    else:
        asked = [level for level in measurement.levels if level.concurrency >= required]
        most = max((level.concurrency for level in asked or measurement.levels), default=0)
        if not asked:
            return rule.cannot_run(
                f"the load never asked for {required} at once, its highest level is {most}"
            )
        peaks = [level.peak_running for level in asked]
    known = [peak for peak in peaks if peak is not None]
    if not known:
        return rule.cannot_run("the engine's running requests were not observed")
    peak = max(known)
    if peak >= required:
        return rule.says("GO", peak, f"{peak} requests ran at once, {required} are required")
    found = f"only {peak} requests ran at once with {most} asked for"
    if fitting is not None and fitting < required:
        return rule.says("NO-GO", peak, f"{found}: the pool is the limit, as its capacity says")
    return rule.cannot_run(f"{found}, though {required} should fit", peak)


def kernel_provenance_gate(intent: VariantIntent, provenances: Sequence[Provenance]) -> Gate:
    """Did the engine run what the variant says, in every run that its numbers come from?

    A mismatch is INCONCLUSIVE: the numbers are of another variant, so nothing is known about this one.
    """
    rule = Rule("kernel-provenance", 0, "mismatches")
    if not provenances:
        return rule.cannot_run("no engine ran, so nothing is known about its kernels")
    problems = list(dict.fromkeys(problem for item in provenances for problem in _mismatches(intent, item)))
    versions = sorted({f"{item.engine} {item.engine_version}" for item in provenances})
    if len(versions) > 1:
        problems.append(f"load and quality ran on different engines ({', '.join(versions)})")
    if problems:
        return rule.cannot_run("; ".join(problems), len(problems))
    found = provenances[0]
    weights = f"kernel {found.weights_kernel}" if found.weights_kernel else "unquantized weights"
    scales = f", scales {found.kv_scales}" if found.kv_scales else ""
    return rule.says("GO", 0, f"the engine took {weights}, KV cache {found.kv_cache_dtype}{scales}")


def _mismatches(intent: VariantIntent, found: Provenance) -> list[str]:
    problems = []
    wanted_kv = _kv_family(intent.kv_cache_dtype)
    taken_kv = _kv_family(found.kv_cache_dtype)
    if taken_kv is None:
        problems.append(f"the engine's KV cache dtype is not known ({found.kv_cache_dtype or 'not logged'})")
    elif taken_kv != wanted_kv:
        problems.append(
            f"the variant means a {intent.kv_cache_dtype} KV cache, the engine took {found.kv_cache_dtype}"
        )
    elif wanted_kv == "fp8" and intent.kv_scales is not None and found.kv_scales != intent.kv_scales:
        problems.append(
            f"the variant means KV scales {intent.kv_scales}, the engine took {found.kv_scales or 'unknown ones'}"
        )
    if intent.weights == "bf16" and found.weights_kernel is not None:
        problems.append(
            f"the variant means unquantized weights, the engine took the kernel {found.weights_kernel}"
        )
    if intent.weights != "bf16" and found.weights_kernel is None:
        problems.append(
            f"the variant means {intent.weights} weights, but no quantized kernel is known to have run"
        )
    if found.kv_skipped_layers != intent.skipped_layers:
        problems.append(
            f"the variant leaves the cache of {intent.skipped_layers} layers at 16 bits, the engine of {found.kv_skipped_layers}"
        )
    pinned = intent.attention_backend
    if pinned and found.attention_backend != pinned:
        problems.append(
            f"the variant pins the attention backend {pinned}, the engine took {found.attention_backend or 'an unknown one'}"
        )
    expected = intent.weights_kernel
    if expected and found.weights_kernel and expected.lower() not in found.weights_kernel.lower():
        problems.append(f"the variant means the kernel {expected}, the engine took {found.weights_kernel}")
    return problems


def _kv_family(dtype: str | None) -> str | None:
    """What must agree: e4m3 has two names, and scales per token and head are another cache than one scale per layer. 'auto' is
    not an answer: it can be either."""
    if dtype is None:
        return None
    if dtype.endswith("_per_token_head"):
        return dtype
    if dtype.startswith("fp8") or dtype.startswith("float8"):
        return "fp8"
    return "bf16" if dtype in ("bfloat16", "bf16", "torch.bfloat16") else None
