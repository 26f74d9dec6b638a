"""lm-eval's client of the OpenAI completions endpoint, without its silences.

lm-eval cuts a long prompt on the left, pairs answers with requests by position without counting them, and sums however
many logprobs it finds: a server that leaves some out changes a score, not an exit code. This subclass checks every
request before the first is sent and every answer before it becomes a number. It imports lm-eval at the top: import it
where lm-eval is wanted, not before.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from operator import itemgetter
from typing import Any

import requests
from lm_eval.models.openai_completions import LocalCompletionsAPI

from pipeline.errors import EngineFailedError, UserInputError
from pipeline.quality.cache import RequestCache
from pipeline.quality.stall import StallGuard

EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]
NAMED_ITEMS = 5


class BadAnswer(EngineFailedError):
    """The endpoint answered with something that is no score."""


class EndpointError(EngineFailedError):
    """A scoring request got no answer."""


class Generation(str):
    """A generated answer that remembers whether it ended at the token limit. To lm-eval it is text: what it makes of it isn't
    an answer as it was generated, and forgets."""

    cut: bool

    def __new__(cls, text: str = "", cut: bool = False) -> Generation:
        made = super().__new__(cls, text)
        made.cut = cut
        return made

    def __getnewargs__(self) -> tuple[str, bool]:  # type: ignore[override]
        """For copies: lm-eval's filters make them."""
        return str(self), self.cut


class ScoringModel(LocalCompletionsAPI):
    """`local-completions`, strict in both directions.

    What is sent must fit and must not hold a doubled space or BOS. What comes back is checked before it is a score, and
    kept in `cache`, if there is one, only then.
    """

    def __init__(
        self,
        allow_truncated: bool,
        brings_bos: bool = False,
        cache: RequestCache | None = None,
        guard: StallGuard | None = None,
        prompts_per_request: int = 1,
        **arguments: Any,
    ) -> None:
        """`brings_bos`: the prompts' text begins with its own BOS, as a chat template's may; then none is put before it.

        `guard` ends the run when the engine stands still; how long an answer may take is not limited otherwise.
        `num_concurrent` counts prompts; those that are scored go `prompts_per_request` in a request.
        """
        super().__init__(**arguments)
        self._prompts_in_flight = self._concurrent
        self._prompts_per_request = prompts_per_request
        self.allow_truncated = allow_truncated
        self.truncated_items: set[str] = set()
        self.bos_tokens: set[int] = set()
        self._adds_bos = _adds_bos(self.tokenizer)
        self.add_bos_token = self._adds_bos and not brings_bos
        self._cache = cache
        self._guard = guard
        self._item_ids: list[str] = []
        self._failed = False

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Any:
        """The model's own template around a chat. An item that is a chat itself comes from lm-eval as one user's turn that holds
        its messages as JSON, since a task's text is text: it becomes the turns that it is."""
        turns = [turn for one in chat_history for turn in _turns(one["content"]) or [one]]
        return super().apply_chat_template(turns, add_generation_prompt)

    # --- what is asked ----------------------------------------------------------------------------------------

    def loglikelihood(self, instances: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Remember which item each request belongs to, so that a refusal can name it. Only the requests get a bar."""
        self._item_ids = [_name(instance) for instance in instances]
        return list(super().loglikelihood(instances, disable_tqdm=True))

    def loglikelihood_rolling(self, instances: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Whole texts, one after the other, each in windows of the context's length."""
        if self.prefix_token_id is None:
            raise UserInputError(
                "the tokenizer has neither BOS nor EOS, so a text's first token can't be scored"
            )
        found: list[float] = []
        for instance in instances:
            self._item_ids = [_name(instance)]
            found += super().loglikelihood_rolling([instance], disable_tqdm=True)
        return found

    def generate_until(self, instances: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers as text; prompts are checked to leave room for them."""
        for instance in instances:
            context, settings = instance.args
            _refuse_chat(_name(instance), context)
            tokens = self.tok_encode(context)
            self._count_bos(tokens)
            if len(tokens) + settings.get("max_gen_toks", self._max_gen_toks) > self.max_length:
                self.truncated_items.add(_name(instance))
        self._refuse_truncated(0)
        answers = list(super().generate_until(instances, disable_tqdm=True))
        if len(answers) != len(instances):
            raise BadAnswer(f"the engine answered {len(answers)} of {len(instances)} requests")
        return answers

    def _loglikelihood_tokens(self, encoded: list[EncodedRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        self._check_requests(encoded)
        answers = list(super()._loglikelihood_tokens(encoded, **kwargs))
        if len(answers) != len(encoded):
            raise BadAnswer(f"the engine answered {len(answers)} of {len(encoded)} scoring requests")
        return answers

    def _check_requests(self, encoded: Sequence[EncodedRequest]) -> None:
        """`UserInputError` for a choice without a token, one scored with two spaces, or a prompt that would be cut."""
        longest = 0
        # The windows of a rolling text have no choice of their own, and fit because they are cut to.
        names = self._item_ids if len(self._item_ids) == len(encoded) else self._item_ids * len(encoded)
        for item, (texts, context_tokens, choice_tokens) in zip(names, encoded, strict=True):
            if texts is not None:
                _refuse_chat(item, texts[0])
                _check_choice(item, *texts, choice_tokens)
                self._count_bos(context_tokens)
            tokens = len(context_tokens) + len(choice_tokens)
            longest = max(longest, tokens)
            if tokens > self.max_length:
                self.truncated_items.add(item)
        self._refuse_truncated(longest)

    def _refuse_truncated(self, longest: int) -> None:
        if not self.truncated_items or self.allow_truncated:
            return
        names = ", ".join(sorted(self.truncated_items)[:NAMED_ITEMS])
        has = f" (the longest has {longest})" if longest else ""
        raise UserInputError(
            f"{len(self.truncated_items)} eval items don't fit in {self.max_length} tokens of prompt and choice{has} and would "
            f"be cut: {names}; raise the server's max_model_len or shorten them"
        )

    def _count_bos(self, tokens: Sequence[int]) -> None:
        """Count the prompt's leading BOS tokens; `UserInputError` where there are two, or none though the model wants one."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        count = 0
        while count < len(tokens) and tokens[count] == bos:
            count += 1
        self.bos_tokens.add(count)
        if count > 1 or (count == 0 and self._adds_bos):
            raise UserInputError(
                f"prompts begin with {count} BOS tokens where the model's tokenizer puts "
                f"{'one' if self._adds_bos else 'none'}: look at the chat template and the task's doc_to_text"
            )

    # --- what is sent and read back ---------------------------------------------------------------------------

    async def get_batched_requests(
        self, requests: list[Any], cache_keys: list[Any], *, generate: bool = True, **kwargs: Any
    ) -> Any:
        """All requests, so many in flight that `num_concurrent` prompts are. Prompts to be continued go one by one: an answer that is
        done would wait for the longest of its request, and its place with it."""
        self._batch_size = 1 if generate else self._prompts_per_request
        self._concurrent = max(2, self._prompts_in_flight // self._batch_size)
        return await super().get_batched_requests(requests, cache_keys, generate=generate, **kwargs)

    async def amodel_call(
        self,
        session: Any,
        sem: Any,
        messages: Any,
        *,
        generate: bool = True,
        cache_keys: Any = None,
        ctxlens: list[int] | None = None,
        gen_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One request, in flight with others; whatever went wrong on the way is the engine's failure.

        Answers are kept by prompt, whatever it was sent with; what is kept isn't sent. The first failure ends the run. Those that
        follow from it end as cancelled: asyncio prints a traceback for every other exception that nobody waits for.
        """
        contexts: Sequence[int | None] = ctxlens or [None] * len(messages)
        keys = [
            {
                "messages": [message],
                "generate": generate,
                "context_tokens": [context] if ctxlens else ctxlens,
                "settings": gen_kwargs,
                "seed": self._seed,
            }
            for message, context in zip(messages, contexts, strict=True)
        ]
        answers = [self._kept(key, generate) for key in keys]
        open_places = [place for place, answer in enumerate(answers) if answer is None]
        if not open_places:
            return answers
        try:
            found = await self._guarded(
                super().amodel_call(
                    session,
                    sem,
                    [messages[place] for place in open_places],
                    generate=generate,
                    cache_keys=cache_keys and [cache_keys[place] for place in open_places],
                    ctxlens=ctxlens and [ctxlens[place] for place in open_places],
                    gen_kwargs=gen_kwargs,
                    **kwargs,
                )
            )
            if len(found) != len(open_places):
                raise BadAnswer(
                    f"the engine answered {len(found)} of the {len(open_places)} prompts of a request"
                )
        except Exception as error:
            if self._failed:
                raise asyncio.CancelledError from None
            self._failed = True
            raise (error if isinstance(error, EngineFailedError) else _endpoint_error(error)) from None
        for place, answer in zip(open_places, found, strict=True):
            answers[place] = answer
            if self._cache is not None:
                kept = [str(answer), answer.cut] if generate else list(answer)
                self._cache.put(keys[place], [kept])
        return answers

    def _kept(self, key: dict[str, Any], generate: bool) -> Any | None:
        """The cache's answer to one prompt; None where it has none."""
        kept = None if self._cache is None else self._cache.get(key)
        if kept is None:
            return None
        return Generation(*kept[0]) if generate else tuple(kept[0])

    async def _guarded(self, request: Coroutine[Any, Any, Any]) -> Any:
        """The request's answer; looks now and then whether the engine works at all."""
        if self._guard is None:
            return await request
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({task}, timeout=self._guard.interval_s))[0]:
                self._guard.check()
            answers = task.result()
        finally:
            task.cancel()
        self._guard.answered()
        return answers

    @staticmethod
    def parse_generations(outputs: Any, **kwargs: Any) -> list[str]:
        """The generated texts in the prompts' order. `BadAnswer` where one is missing or doesn't say how it ended."""
        choices = outputs.get("choices") if isinstance(outputs, dict) else None
        if not isinstance(choices, list) or not choices:
            raise BadAnswer(f"the engine's answer to a request has no choices: {str(outputs)[:200]}")
        found = []
        for choice in sorted(choices, key=lambda one: one.get("index", 0)):
            text, reason = choice.get("text"), choice.get("finish_reason")
            if not isinstance(text, str) or reason not in ("stop", "length"):
                raise BadAnswer(f"the engine's answer has no text or no proper end: {str(choice)[:200]}")
            found.append(Generation(text, reason == "length"))
        return found  # type: ignore[return-value]

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


def _turns(text: str) -> list[dict[str, str]] | None:
    """The turns of a chat that stands as JSON in a text, None for any other text."""
    if not text.startswith("[{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    is_chat = all(isinstance(turn, dict) and turn.keys() == {"role", "content"} for turn in found)
    return found if is_chat else None


def _refuse_chat(item: str, prompt: str) -> None:
    """A chat that no template was put around would be scored as the JSON it came as."""
    if _turns(prompt) is not None:
        raise UserInputError(
            f"eval item {item} is a chat (messages), which only the model's chat template turns into a prompt; set "
            "chat_template: true for its task in conf/evalset/"
        )


def _check_choice(item: str, context: str, choice: str, choice_tokens: Sequence[int]) -> None:
    if not choice_tokens:
        raise UserInputError(
            f"eval item {item}: choice {choice!r} has no token of its own after its prompt; reword it"
        )
    if (context[-1:] + choice).startswith("  ") or choice.startswith("  "):
        raise UserInputError(
            f"eval item {item}: choice {choice!r} would be scored after two spaces; lm-eval's target_delimiter is one "
            'space by default: set `target_delimiter: ""` in the task yaml or leave the space out of the choice'
        )


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the model's own tokenizer begins a text with a BOS token."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer("x").input_ids)[:1] == [bos]


def _name(instance: Any) -> str:
    """The item's id; a benchmark's items have none, then their place in it."""
    return str(instance.doc.get("id", instance.doc_id) if isinstance(instance.doc, dict) else instance.doc_id)


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
