"""How far a variant's next-token distributions are from the reference's, on one fixed stream of tokens.

Accuracy needs hundreds of items to show a point, because an item says yes or no. Here every token says a number, so that a
hundred prompts decide; what they decide is closeness to the reference, not whether anyone would mind. The figures are the ones
that llama.cpp's perplexity tool made common (tools/perplexity/README.md); each comes with a standard error that knows that the
tokens of one prompt, and the prompts of one source, go together.

What is known of each position is what the engine returns: the token's own logprob and the k likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.errors import UserInputError
from pipeline.quality.intervals import Array, clustered_se, two_sided_z
from pipeline.results import Divergence, Estimate

KL_PERCENTILES = (50, 90, 99)
DELTA_P_PERCENTILES = (1, 5, 50, 95, 99)
RESAMPLES = 300  # of the bootstrap behind a percentile's standard error
NAMED_PROMPTS = 5
_TINY = 1e-9


@dataclass(frozen=True)
class ScoredPrompt:
    """One prompt and its continuation as a variant scored it.

    `tokens` are n ids, of which the first `prompt_tokens` are the eval prompt. `logprobs` (n − 1) are those of tokens 1 to
    n − 1; `top_ids` and `top_logprobs` (n − 1 × k) the k likeliest tokens at each, the likeliest first. Natural log.
    """

    id: str
    cluster: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ScoredStream:
    """All prompts of one variant; `sha256` is that of the tokens, so equal for all variants of one stream."""

    sha256: str
    top_k: int
    prompts: tuple[ScoredPrompt, ...]


def diverge(reference: ScoredStream, variant: ScoredStream, confidence: float) -> Divergence:
    """Every figure of `variant` against `reference`. `UserInputError` where they didn't score the same tokens."""
    _require_same(reference, variant)
    pairs = list(zip(reference.prompts, variant.prompts, strict=True))
    clusters = [first.cluster for first, _ in pairs for _ in first.logprobs]
    own = np.array([value for _, second in pairs for value in second.logprobs])
    base = np.array([value for first, _ in pairs for value in first.logprobs])
    divergence, tail = _truncated_kl(pairs)
    same_top = np.array(
        [a[0] == b[0] for first, second in pairs for a, b in zip(first.top_ids, second.top_ids, strict=True)],
        dtype=float,
    )
    change = np.exp(own) - np.exp(base)
    draws = _Resampled(clusters)
    return Divergence(
        stream_sha256=reference.sha256,
        prompts=len(pairs),
        tokens=len(base),
        top_k=reference.top_k,
        reference_perplexity=float(np.exp(-base.mean())),
        perplexity=float(np.exp(-own.mean())),
        perplexity_ratio=_exponential(_mean(base - own, clusters, confidence)),
        kl=_mean(divergence, clusters, confidence),
        kl_percentiles={str(q): draws.percentile(divergence, q, confidence) for q in KL_PERCENTILES},
        kl_tail_mass=float(tail.mean()),
        same_top1=_mean(same_top, clusters, confidence),
        delta_p_mean=_mean(change, clusters, confidence),
        delta_p_rms=_root(_mean(change**2, clusters, confidence)),
        delta_p_percentiles={str(q): draws.percentile(change, q, confidence) for q in DELTA_P_PERCENTILES},
    )


def truncated_kl(
    ids: Sequence[int], logprobs: Sequence[float], other: dict[int, float]
) -> tuple[float, float]:
    """KL divergence of one position in nats, and the reference's mass that it lumps together.

    `ids` and `logprobs` are the reference's likeliest tokens, `other` all logprobs that are known of the variant. Tokens known
    on both sides are compared one by one, and everything else as one. By the log-sum inequality that is a lower bound of
    the full divergence (Cover & Thomas, Elements of Information Theory, theorem 2.7.1), near to it while the lumped mass is small.
    """
    known = [(logprob, other[token]) for token, logprob in zip(ids, logprobs, strict=True) if token in other]
    p = [math.exp(first) for first, _ in known]
    rest_p = max(_TINY, 1.0 - math.fsum(p))
    rest_q = max(_TINY, 1.0 - math.fsum(math.exp(second) for _, second in known))
    total = math.fsum(mass * (first - second) for mass, (first, second) in zip(p, known, strict=True))
    return max(0.0, total + rest_p * math.log(rest_p / rest_q)), rest_p


def _truncated_kl(pairs: Sequence[tuple[ScoredPrompt, ScoredPrompt]]) -> tuple[Array, Array]:
    found = []
    for first, second in pairs:
        for place, (ids, logprobs) in enumerate(zip(first.top_ids, first.top_logprobs, strict=True)):
            other = dict(zip(second.top_ids[place], second.top_logprobs[place], strict=True))
            other[second.tokens[place + 1]] = second.logprobs[place]
            found.append(truncated_kl(ids, logprobs, other))
    values = np.array(found)
    return values[:, 0], values[:, 1]


def _require_same(reference: ScoredStream, variant: ScoredStream) -> None:
    if not reference.prompts:
        raise UserInputError("the reference scored no token stream")
    if reference.sha256 != variant.sha256:
        theirs = {prompt.id: prompt.tokens for prompt in variant.prompts}
        changed = [prompt.id for prompt in reference.prompts if theirs.get(prompt.id) != prompt.tokens]
        raise UserInputError(
            f"the token streams differ at {', '.join(changed[:NAMED_PROMPTS]) or 'further prompts'}: the variant scored another "
            "stream than the reference; run the stage quality again for both"
        )
    if reference.top_k != variant.top_k:
        raise UserInputError(
            f"the reference kept the {reference.top_k} likeliest tokens, the variant {variant.top_k}: not comparable"
        )
    for side, stream in (("reference", reference), ("variant", variant)):
        odd = [prompt.id for prompt in stream.prompts if not all(map(math.isfinite, prompt.logprobs))]
        if odd:
            raise UserInputError(
                f"the {side} has logprobs that are no numbers in {', '.join(odd[:NAMED_PROMPTS])}"
            )


def _mean(values: Array, clusters: Sequence[str], confidence: float) -> Estimate:
    value = float(values.mean())
    se = clustered_se(values.tolist(), clusters)
    half = None if se is None else two_sided_z(confidence) * se
    return Estimate(value=value, se=se, ci=None if half is None else (value - half, value + half))


def _exponential(log: Estimate) -> Estimate:
    """exp of an estimate, by the delta method; the interval is exp of the interval, and stays above 0."""
    value = math.exp(log.value)
    ci = None if log.ci is None else (math.exp(log.ci[0]), math.exp(log.ci[1]))
    return Estimate(value=value, se=None if log.se is None else value * log.se, ci=ci)


def _root(square: Estimate) -> Estimate:
    """Square root of an estimate, by the delta method."""
    value = math.sqrt(square.value)
    se = None if square.se is None or not value else square.se / (2 * value)
    ci = None if square.ci is None else (math.sqrt(max(0.0, square.ci[0])), math.sqrt(square.ci[1]))
    return Estimate(value=value, se=se, ci=ci)


class _Resampled:
    """Bootstrap over clusters, drawn once and used for every percentile."""

    def __init__(self, clusters: Sequence[str]) -> None:
        _, self._index = np.unique(np.asarray(clusters), return_inverse=True)
        groups = int(self._index.max()) + 1
        rng = np.random.default_rng(0)
        self._weights = rng.multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)
        self._groups = groups

    def percentile(self, values: Array, q: float, confidence: float) -> Estimate:
        """Percentile `q` of all positions, its standard error and its percentile interval."""
        value = float(np.quantile(values, q / 100))
        if self._groups < 2:
            return Estimate(value=value, se=None, ci=None)
        order = np.argsort(values)
        weights = self._weights[:, self._index[order]].cumsum(axis=1)
        at = (weights < q / 100 * weights[:, -1:]).sum(axis=1)
        found = values[order][np.minimum(at, len(values) - 1)]
        low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Estimate(value=value, se=float(found.std(ddof=1)), ci=(float(low), float(high)))
