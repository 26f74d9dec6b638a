"""The mock engine's wire format: tokens, pseudo-logprobs, response bodies, metrics page and start-up log.

Everything here is a pure function of its arguments, so the bytes that the mock sends can be compared with recordings
of the real engine (`tests/contract/recorded/`) without starting anything. Shapes follow vLLM 0.32.0,
`vllm/entrypoints/openai/completion/` and `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Scorer = Callable[[str, str], float]
"""(text before the token, the token's text) -> natural-log probability."""


class Tokens:
    """Turns prompts into (ids, strings). With a `tokenizer.json` the counts are exactly the model's, else words."""

    def __init__(self, model: str | None) -> None:
        self._tokenizer: Any = None
        file = Path(model) / "tokenizer.json" if model else None
        if file is not None and file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def split(self, prompt: str | list[int]) -> tuple[list[int], list[str]]:
        """One prompt as ids and the text of each token; joined, the strings are the prompt's text."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                words = re.findall(r"\s*\S+|\s+$", prompt)
                return [_word_id(word) for word in words], words
            prompt = self._tokenizer.encode(prompt).ids
        return list(prompt), self._texts(prompt)

    def _texts(self, ids: list[int]) -> list[str]:
        """The text that each id adds. A character of several tokens (most Chinese ones) comes with its last: alone, each of
        them decodes to a replacement sign, and their texts would no longer add up to the prompt's."""
        if self._tokenizer is None:
            return [self.text(token) for token in ids]
        texts: list[str] = []
        waiting: list[int] = []
        for token in ids:
            waiting.append(token)
            text = str(self._tokenizer.decode(waiting, skip_special_tokens=False))
            whole = not text.endswith("\ufffd")
            texts.append(text if whole else "")
            if whole:
                waiting = []
        return texts

    def text(self, token: int) -> str:
        """The text of one id."""
        if self._tokenizer is None:
            return f" t{token}"
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


def _word_id(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big")


def pseudo_logprob(prefix: str, token: str, seed: int = 0) -> float:
    """A deterministic value in [-8, -0.01]: the same text always scores the same, another seed scores otherwise."""
    digest = hashlib.sha256(f"{seed}\0{prefix[-64:]}\0{token}".encode()).digest()
    return -0.01 - 7.99 * int.from_bytes(digest[:4], "big") / 2**32


def generated(prompt: list[str], count: int) -> list[str]:
    """The `count` tokens that "follow" the prompt: a function of its text alone."""
    start = _word_id("".join(prompt))
    return [f" w{(start + index) % 1000}" for index in range(count)]


def logprobs_payload(tokens: list[str], first_is_prompt: bool, top: int, score: Scorer) -> dict[str, Any]:
    """The `logprobs` object: tokens, token_logprobs, text_offset, top_logprobs. The prompt's first token has null."""
    offsets, values, tops = [], [], []
    prefix = ""
    for index, token in enumerate(tokens):
        offsets.append(len(prefix))
        if index == 0 and first_is_prompt:
            values.append(None)
            tops.append(None)
        else:
            value = score(prefix, token)
            values.append(value)
            alternatives = {token: value}
            if top and value < math.log(0.5):  # the greedy token differs: vLLM lists it beside the chosen one
                alternatives[" <greedy>"] = max(math.log(0.6), value)
            tops.append(alternatives)
        prefix += token
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def prompt_logprobs_payload(ids: list[int], tokens: list[str], top: int, score: Scorer) -> list[Any]:
    """The `prompt_logprobs` list: null, then per position {id: {logprob, rank, decoded_token}}."""
    payload: list[Any] = [None]
    for index in range(1, len(ids)):
        value = score("".join(tokens[:index]), tokens[index])
        entries = {str(ids[index]): {"logprob": value, "rank": top + 7, "decoded_token": tokens[index]}}
        for rank in range(1, top + 1):
            other = {"logprob": math.log(0.5 / 2**rank), "rank": rank, "decoded_token": f" alt{rank}"}
            entries[str(1_000_000 + rank)] = other
        payload.append(entries)
    return payload


def completion_body(request: str, created: int, model: str, choices: list[Any], usage: Any) -> dict[str, Any]:
    """A non-streaming `/v1/completions` answer."""
    return {
        "id": request,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-mock",
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def choice_payload(
    index: int, text: str, logprobs: Any, prompt_logprobs: Any, token_ids: Any = None, prompt_ids: Any = None
) -> dict[str, Any]:
    """One choice of a non-streaming answer; the ids are there when `return_token_ids` asks for them."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": token_ids,
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prompt_ids,
        "routed_experts": None,
    }


def delta_payload(text: str, finish_reason: str | None) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }


def usage_payload(prompt_tokens: int, completion_tokens: int, streaming: bool = False) -> dict[str, Any]:
    """The `usage` object; the trailing chunk of a stream leaves the null details out."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return usage if streaming else {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}


def too_long(max_model_len: int) -> str:
    """The message of the 400 for a prompt that leaves no room."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of the input prompt. (parameter=input_tokens, value={max_model_len + 1})"
    )


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """vLLM's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def sse(payload: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


METRICS = (
    # (name without "vllm:", type, key of the counters given to metrics_page)
    ("num_requests_running", "gauge", "running"),
    ("num_requests_waiting", "gauge", "waiting"),
    ("kv_cache_usage_perc", "gauge", "kv_usage"),
    ("prefix_cache_queries_total", "counter", "prefix_queries"),
    ("prefix_cache_hits_total", "counter", "prefix_hits"),
    ("num_preemptions_total", "counter", "preemptions"),
    ("prompt_tokens_total", "counter", "prompt_tokens"),
    ("generation_tokens_total", "counter", "generation_tokens"),
)


def metrics_page(model: str, values: dict[str, float], cache: dict[str, Any]) -> str:
    """The `/metrics` page: vLLM's names and labels, with `cache` as the labels of `vllm:cache_config_info`."""
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = []
    for name, kind, key in METRICS:
        lines += [
            f"# HELP vllm:{name} {key}",
            f"# TYPE vllm:{name} {kind}",
            f"vllm:{name}{labels} {values[key]}",
        ]
    info = ",".join(f'{key}="{value}"' for key, value in sorted({**cache, "engine": "0"}.items()))
    lines += [
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{info}}} 1.0",
    ]
    return "\n".join(lines) + "\n"


def startup_log(model: str, tokens: int, max_model_len: int, kv_dtype: str, port: int) -> list[str]:
    """The lines of a healthy start on a CPU that our readers look at."""
    core = "(EngineCore pid=1) INFO 11-29 12:00:00"
    api = "(APIServer pid=1) INFO 11-29 12:00:00"
    lines = [
        f"{api} [utils.py:345] version 0.32.0",
        f"{api} [utils.py:345] model   {model}",
        f"{core} [core.py:116] Initializing a V1 LLM engine (v0.32.0) with config: model='{model}', "
        f"dtype=torch.bfloat16, max_seq_len={max_model_len}, quantization=None, kv_cache_dtype={kv_dtype}, "
        "device_config=cpu, seed=0",
    ]
    if kv_dtype.startswith("fp8"):
        lines.append(
            "(EngineCore pid=1) WARNING 11-29 12:00:00 [kv_cache.py:163] Using KV cache scaling factor 1.0 for "
            "fp8_e4m3. If this is unintended, verify that k/v_scale scaling factors are properly set in the checkpoint."
        )
    return [
        *lines,
        f"{core} [kv_cache_utils.py:2327] CPU KV cache size: {tokens:,} tokens, Maximum concurrency for "
        f"{max_model_len:,} tokens per request: {tokens / max_model_len:.2f}x",
        f"{api} [api_server.py:618] Starting vLLM API server 0 on http://127.0.0.1:{port}",
        "(APIServer pid=1) INFO:     Application startup complete.",
    ]
