"""The binomial bound: MLPerf's published sample sizes, and that it keeps its promise."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from pipeline.errors import UserInputError
from pipeline.load.bounds import latency_bound, requests_needed

# MLCommons inference rules, early stopping at 99 % confidence: (percentile, over-limit requests, requests needed).
MLPERF = [
    (0.99, 0, 459),
    (0.99, 1, 662),
    (0.99, 2, 838),
    (0.99, 5, 1307),
    (0.95, 0, 90),
    (0.95, 1, 130),
    (0.95, 2, 165),
    (0.95, 5, 259),
    (0.90, 0, 44),
    (0.90, 1, 64),
    (0.90, 2, 81),
    (0.90, 5, 127),
]


@pytest.mark.parametrize(("percentile", "over", "needed"), MLPERF)
def test_published_sample_sizes(percentile: float, over: int, needed: int) -> None:
    assert requests_needed(percentile, over) == needed
    assert latency_bound(needed, over, percentile) == "pass"
    assert latency_bound(needed - 1, over, percentile) == "undecided"


def test_fail_needs_as_much_evidence_as_pass() -> None:
    # p90 of 20 requests: P[X >= 6 | 20, 0.1] = 0.0113, P[X >= 7] = 0.0024
    assert latency_bound(20, 6, 0.90) == "undecided"
    assert latency_bound(20, 7, 0.90) == "fail"
    assert latency_bound(20, 20, 0.90) == "fail"


def test_small_samples_stay_undecided() -> None:
    assert latency_bound(0, 0, 0.90) == "undecided"
    assert latency_bound(8, 0, 0.90) == "undecided"
    assert latency_bound(1, 1, 0.90) == "undecided"  # 1 of 1 is seen with probability 0.1 at the limit


@pytest.mark.parametrize("n", [10, 64, 300])
@pytest.mark.parametrize("percentile", [0.9, 0.99])
def test_wrong_claims_stay_rare(n: int, percentile: float) -> None:
    """At a true share exactly on the limit, each claim is made with probability at most 1 %."""
    share = 1 - percentile
    claims = {"pass": 0.0, "fail": 0.0, "undecided": 0.0}
    for over in range(n + 1):
        claims[latency_bound(n, over, percentile)] += float(binom.pmf(over, n, share))
    assert claims["pass"] <= 0.01 + 1e-12
    assert claims["fail"] <= 0.01 + 1e-12


def test_more_confidence_needs_more_requests() -> None:
    assert requests_needed(0.9, 0, 0.95) == 29  # 0.9^29 = 0.0471, 0.9^28 = 0.0523
    assert requests_needed(0.9, 0, 0.95) < requests_needed(0.9, 0, 0.99)


@pytest.mark.parametrize(
    ("n", "over", "percentile", "confidence", "named"),
    [
        (10, 11, 0.9, 0.99, "11"),
        (10, -1, 0.9, 0.99, "-1"),
        (10, 0, 1.0, 0.99, "percentile 1.0"),
        (10, 0, 90, 0.99, "percentile 90"),
        (10, 0, 0.9, 0.5, "confidence 0.5"),
    ],
)
def test_values_out_of_range_are_refused(
    n: int, over: int, percentile: float, confidence: float, named: str
) -> None:
    with pytest.raises(UserInputError, match=named):
        latency_bound(n, over, percentile, confidence)


def test_negative_over_count_is_refused() -> None:
    with pytest.raises(UserInputError, match="negative"):
        requests_needed(0.9, -1)
