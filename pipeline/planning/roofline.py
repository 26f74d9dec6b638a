"""How long an engine takes over requests, by a roofline: each step takes what its bytes or its arithmetic take, whichever is more.

Pure: plain numbers in, seconds out. A step reads all weights once and the keys and values of every running sequence; prompt
tokens cost arithmetic. A mixed step is taken as its two parts one after the other, which is on the slow side.

The two efficiencies and the constant are those with which a published sweep on an RTX 4090 is met within 1 % at every
concurrency (Mistral-7B-Instruct-v0.3, vLLM, 256 prompt and 100 generated tokens: 2.09, 3.78, 6.44, 9.73 and 11.87 requests/s at
4, 8, 16, 32 and 48 streams; mushfiqrahman.dev, "Benchmarking Mistral-7B on RTX 4090 (vLLM)"). Of another (a 7B of Qwen2.5's
geometry, 300 requests at once; databasemart.com) they give 7.2 requests/s where 5.96 were seen. None has been measured by us, and
quantized kernels are taken to be as near to the card's bytes and arithmetic as 16-bit ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BANDWIDTH_SHARE = 0.9
"""Of the data sheet's bandwidth that decoding reaches."""
COMPUTE_SHARE = 0.5
"""Of the data sheet's dense 16-bit TFLOPS that prompts and large batches reach."""
STEP_S = 0.0015
"""Of each step beside both: scheduling, sampling, launching."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of many requests: means, mean squares, and the longest answer. Prompts and answers are independent."""

    prompt: float
    prompt_squared: float
    answer: float
    answer_squared: float
    longest_answer: float

    @classmethod
    def of(cls, prompts: Iterable[float], answers: Iterable[float]) -> Lengths:
        """Of lists that stand for the whole, each entry as often as any other."""
        prompts, answers = list(prompts), list(answers)
        return cls(
            _mean(prompts),
            _mean([tokens**2 for tokens in prompts]),
            _mean(answers),
            _mean([tokens**2 for tokens in answers]),
            max(answers),
        )

    @property
    def context(self) -> float:
        """Mean tokens that a running request holds: long answers run longer, so they weigh more."""
        return self.prompt + (self.answer_squared / (2 * self.answer) if self.answer else 0.0)


@dataclass(frozen=True)
class Roofline:
    """One variant on its card or cards."""

    weight_bytes: float
    """Read in every step."""
    flops_per_token: float
    """Of all linear layers, the output head included."""
    flops_per_pair: float
    """Of attention, for each pair of a token and one before it."""
    kv_bytes_per_token: float
    pool_tokens: float
    bandwidth_bytes_s: float
    """By the data sheet, of all cards that share a layer."""
    flops_s: float

    def prefill_s(self, lengths: Lengths) -> float:
        """The prompt of one request."""
        pairs = lengths.prompt_squared / 2
        work = lengths.prompt * self.flops_per_token + pairs * self.flops_per_pair
        return work / (self.flops_s * COMPUTE_SHARE)

    def step_s(self, running: float, context: float) -> float:
        """One token for each of `running` sequences of so many tokens."""
        bandwidth = self.bandwidth_bytes_s * BANDWIDTH_SHARE
        arithmetic = running * self.flops_per_token / (self.flops_s * COMPUTE_SHARE)
        cache = running * context * self.kv_bytes_per_token / bandwidth
        return max(self.weight_bytes / bandwidth, arithmetic) + cache + STEP_S

    def running(self, concurrency: float, context: float) -> float:
        """How many of so many requests the pool holds at once."""
        return max(1.0, min(concurrency, self.pool_tokens / max(context, 1.0)))

    def closed_loop_s(self, requests: float, concurrency: float, lengths: Lengths) -> float:
        """`requests` of them, so many in flight, up to the last one's sending: no drain."""
        running = self.running(min(concurrency, requests), lengths.context)
        steps = requests * lengths.answer / running
        return requests * self.prefill_s(lengths) + steps * self.step_s(running, lengths.context)

    def drained_s(self, requests: float, concurrency: float, lengths: Lengths) -> float:
        """The same to the end of the last: the longest answer, which may have begun last, goes on nearly alone."""
        tail = max(0.0, lengths.longest_answer - lengths.answer) * self.step_s(1, lengths.context)
        return self.closed_loop_s(requests, concurrency, lengths) + tail


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
