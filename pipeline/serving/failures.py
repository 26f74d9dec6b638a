"""Why an engine failed, in one sentence, read out of its log.

A table of patterns in order of how much they explain: a specific cause that vLLM buries under "Engine core initialization
failed. See root cause above" comes before the generic last error line. The texts are vLLM's (0.19 to 0.32), PyTorch's and the
operating system's.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

Cause = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def _pattern(text: str, sentence: str | Callable[[re.Match[str]], str]) -> Cause:
    fixed = sentence if callable(sentence) else (lambda match, text=sentence: match.expand(text))
    return re.compile(text, re.IGNORECASE), fixed


def _no_room(match: re.Match[str]) -> str:
    needed, available, suggestion = match.group(1), match.group(2), match.group(3)
    advice = f"; a maximum length of {suggestion} tokens would fit" if suggestion else ""
    if needed == available:  # the log rounds
        return f"not even one request fits into the {available} GiB of KV cache{advice}"
    return (
        f"not even one request fits: it needs {needed} GiB of KV cache and {available} GiB are there{advice}"
    )


CAUSES: tuple[Cause, ...] = (
    _pattern(r"address already in use", "its port is already in use"),
    _pattern(
        r"To serve at least one request with the model\S* max seq len[^\n]*?\(?([\d.]+) GiB KV cache is needed[^\n]*?"
        r"\(([\d.]+) GiB\)(?:[^\n]*?estimated maximum model length is (\d+))?",
        _no_room,
    ),
    _pattern(
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache after weights and activations",
    ),
    _pattern(
        r"Free memory on device [^\n(]*\(([\d.]+)/([\d.]+) GiB\) on startup is less than",
        r"the card has only \1 of \2 GiB free, less than the memory utilization asks for",
    ),
    _pattern(
        r"Available memory on node \d+ \(([\d.]+)/([\d.]+) GiB\)[^\n]*?requested memory for kv \(([\d.]+)",
        r"the machine has \1 of \2 GiB of memory free and the KV cache asks for \3 GiB",
    ),
    _pattern(
        r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)",
        r"the card ran out of memory asking for \1 more",
    ),
    _pattern(r"CUDA out of memory|OutOfMemoryError", "the card ran out of memory"),
    _pattern(
        r"(?:std::bad_alloc|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|MemoryError)",
        "the machine ran out of memory",
    ),
    _pattern(
        r"FP8 KV cache on CPU requires[^\n.]*",
        "this CPU can't hold an FP8 KV cache with the stock kernels (\\g<0>)",
    ),
    _pattern(
        r"Model architectures? \[?'?([\w', ]+?)'?\]? (?:are|is) not supported",
        r"this engine doesn't know the architecture \1",
    ),
    _pattern(
        r"model type [`'\"]?(\w+)[`'\"]? but Transformers does not recognize",
        r"this engine doesn't know the model type \1",
    ),
    _pattern(
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \([^=\n]*=(\d+)",
        r"a maximum length of \1 tokens is more than the model's own \2",
    ),
    _pattern(
        r"'_C' object has no attribute '(\w+)'|_C(?:\.|' object )has no attribute '?(\w+)'?",
        lambda match: f"the engine lacks the kernel {match.group(1) or match.group(2)} on this machine",
    ),
    _pattern(
        r"Couldn't instantiate the backend tokenizer",
        "the model's folder holds no tokenizer that it can read",
    ),
    _pattern(
        r"Worker proc \S+ died unexpectedly \(exit code: -(\d+)\)",
        lambda match: f"its worker process: {_signal_sentence(int(match.group(1)))}",
    ),
    _pattern(r"api_server\.py: error: ([^\n(]+)", r"the engine refuses its options: \1"),
    _pattern(r"No module named '?([\w.]+)'?", r"the serve environment lacks the module \1"),
)
ERROR_LINE = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)$")
HARMLESS = re.compile(
    r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d "
)  # such a line may quote an exception that was dealt with
LONGEST = 300
CORE_GONE = "engine core exited unexpectedly"  # v1/engine/core_client.py, 0.32
# What follows a failure rather than causes it.
CONSEQUENCES = (
    "Engine core initialization failed",
    "EngineDeadError",
    "See stack trace",
    "See root cause",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "CancelledError",
    "EngineGenerateError",
)


def failure_cause(log_text: str, returncode: int | None = None) -> str:
    """One sentence without a full stop. `returncode` as Python gives it: negative for a signal, None while it lives."""
    for pattern, sentence in CAUSES:
        found = pattern.search(log_text)
        if found is not None:
            return sentence(found)[:LONGEST].rstrip(". ")
    if returncode is not None and returncode < 0:
        return _signal_sentence(-returncode)
    line = _error_line(log_text)
    if line is not None:
        return line[:LONGEST].rstrip(". ")
    if CORE_GONE in log_text:
        return "its engine core process ended without a word, which is what being killed for want of memory looks like"
    if returncode is not None:
        return f"it ended with exit code {returncode} and its log names no cause"
    return "it gave no answer and its log names no cause"


def _error_line(log_text: str) -> str | None:
    """The first error line that is a cause rather than a consequence, without vLLM's prefixes."""
    for line in log_text.splitlines():
        found = ERROR_LINE.search(line)
        if found is not None and not HARMLESS.search(line) and not any(word in line for word in CONSEQUENCES):
            return found[1].strip()
    return None


def _signal_sentence(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "it was killed by signal 9 (SIGKILL), which is what a machine without free memory does"
    return f"it was killed by signal {number} ({name})"
