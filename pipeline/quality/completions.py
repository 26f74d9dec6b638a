"""lm-eval's client of the OpenAI completions endpoint, without its silences.

lm-eval cuts a long prompt on the left, pairs answers with requests by position without counting them, and sums however
many logprobs it finds: a server that leaves some out changes a score, not an exit code. This subclass checks every
request before the first is sent and every answer before it becomes a number. It imports lm-eval at the top: import it
where lm-eval is wanted, not before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import requests
from lm_eval.models.openai_completions import LocalCompletionsAPI

from pipeline.errors import EngineFailedError, UserInputError

EncodedRequest = tuple[tuple[str, str], list[int], list[int]]
NAMED_ITEMS = 5


class BadAnswer(EngineFailedError):
    """The endpoint answered with something that is no score."""


class EndpointError(EngineFailedError):
    """A scoring request got no answer."""


class ScoringModel(LocalCompletionsAPI):
    """`local-completions` for loglikelihoods only, strict in both directions."""

    def __init__(self, allow_truncated: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.allow_truncated = allow_truncated
        self.truncated_items: set[str] = set()
        self._item_ids: list[str] = []
        self._failed = False

    def loglikelihood(self, instances: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Remember which item each request belongs to, so that a refusal can name it. Only the requests get a bar."""
        self._item_ids = [str(instance.doc["id"]) for instance in instances]
        return list(super().loglikelihood(instances, disable_tqdm=True))

    def _loglikelihood_tokens(self, encoded: list[EncodedRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        self._check_requests(encoded)
        answers = list(super()._loglikelihood_tokens(encoded, **kwargs))
        if len(answers) != len(encoded):
            raise BadAnswer(f"the engine answered {len(answers)} of {len(encoded)} scoring requests")
        return answers

    def _check_requests(self, encoded: Sequence[EncodedRequest]) -> None:
        """`UserInputError` for a choice without a token, one scored with two spaces, or a prompt that would be cut."""
        longest = 0
        for item, ((context, choice), context_tokens, choice_tokens) in zip(
            self._item_ids, encoded, strict=True
        ):
            if not choice_tokens:
                raise UserInputError(
                    f"eval item {item}: choice {choice!r} has no token of its own after its prompt; reword it"
                )
            if (context[-1:] + choice).startswith("  ") or choice.startswith("  "):
                raise UserInputError(
                    f"eval item {item}: choice {choice!r} would be scored after two spaces; lm-eval's target_delimiter is one "
                    'space by default: set `target_delimiter: ""` in the task yaml or leave the space out of the choice'
                )
            tokens = len(context_tokens) + len(choice_tokens)
            longest = max(longest, tokens)
            if tokens > self.max_length:
                self.truncated_items.add(item)
        if self.truncated_items and not self.allow_truncated:
            names = ", ".join(sorted(self.truncated_items)[:NAMED_ITEMS])
            raise UserInputError(
                f"{len(self.truncated_items)} eval items don't fit in {self.max_length} tokens of prompt and choice "
                f"(the longest has {longest}) and would be cut: {names}; raise the server's max_model_len or shorten them"
            )

    async def amodel_call(self, *arguments: Any, **kwargs: Any) -> Any:
        """One request, in flight with others; whatever went wrong on the way is the engine's failure.

        The first failure ends the run. Those that follow from it end as cancelled: asyncio prints a traceback for every
        other exception that nobody waits for.
        """
        try:
            return await super().amodel_call(*arguments, **kwargs)
        except Exception as error:
            if self._failed:
                raise asyncio.CancelledError from None
            self._failed = True
            raise (error if isinstance(error, EngineFailedError) else _endpoint_error(error)) from None

    def model_call(self, *arguments: Any, **kwargs: Any) -> Any:
        """One request with none beside it."""
        try:
            answer = super().model_call(*arguments, **kwargs)
        except Exception as error:
            raise _endpoint_error(error) from None
        return answer

    @staticmethod
    def parse_logprobs(
        outputs: Any, tokens: list[list[int]] | None = None, ctxlens: list[int] | None = None, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of the choice's logprobs and whether each was the top one, per prompt of the request.

        The answer to an echoed prompt of n tokens with one token generated holds n + 1 logprobs; only the first is null.
        `BadAnswer` where there are fewer, more, or one that isn't a finite number.
        """
        if tokens is None or ctxlens is None:
            raise ValueError("scoring needs the prompts' tokens and context lengths")
        bodies = outputs if isinstance(outputs, list) else [outputs]
        if not all(isinstance(body, dict) and isinstance(body.get("choices"), list) for body in bodies):
            raise BadAnswer(f"the engine's answer to a scoring request has no choices: {str(outputs)[:200]}")
        choices = [choice for body in bodies for choice in body["choices"]]
        try:
            choices.sort(key=itemgetter("index"))
            indices = [choice["index"] for choice in choices]
        except (KeyError, TypeError):
            raise BadAnswer("the engine's answer holds a choice without an index") from None
        if indices != list(range(len(tokens))):
            raise BadAnswer(
                f"the engine answered {len(indices)} of the {len(tokens)} prompts of a scoring request"
            )
        return [
            _score(choice.get("logprobs"), len(prompt), context)
            for choice, prompt, context in zip(choices, tokens, ctxlens, strict=True)
        ]


def _score(logprobs: Any, prompt_tokens: int, context_tokens: int) -> tuple[float, bool]:
    """Score of the tokens from `context_tokens` to the prompt's end."""
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list) or len(values) != prompt_tokens + 1:
        found = len(values) if isinstance(values, list) else "no"
        raise BadAnswer(
            f"the engine returned {found} logprobs for a prompt of {prompt_tokens} tokens and one generated"
        )
    wanted = values[context_tokens:prompt_tokens]
    for value in wanted:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadAnswer(f"the engine returned {value} as a token's logprob")
        if value > 1e-6:
            raise BadAnswer(f"the engine returned {value} as a token's logprob: a probability above 1")
    tops = logprobs.get("top_logprobs") or []
    greedy = len(tops) == len(values) and all(
        isinstance(top, dict) and top and value >= max(top.values())
        for value, top in zip(wanted, tops[context_tokens:prompt_tokens], strict=True)
    )
    return math.fsum(wanted), greedy


def _endpoint_error(error: BaseException) -> EndpointError:
    if isinstance(error, TimeoutError | requests.Timeout):
        return EndpointError("the engine didn't answer a scoring request in time")
    return EndpointError(
        f"a scoring request failed ({type(error).__name__}: {str(error)[:200] or 'no message'})"
    )
