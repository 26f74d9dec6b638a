"""Why an engine failed, in one sentence, read out of its log.

A table of patterns in order of how much they explain: a specific cause that vLLM buries under "Engine core initialization
failed. See root cause above" comes before the generic last error line. The texts are vLLM's (0.19 to 0.33), PyTorch's, NCCL's and the
operating system's.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from pipeline.environments.toolkit import NO_C_COMPILER, NO_CXX, NO_NINJA, NO_NVCC, NO_PYTHON_H

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


def _no_backend(match: re.Match[str]) -> str:
    backends: dict[str, list[str]] = {}
    for name, why in BACKEND_REASON.findall(match.group(2)):
        backends.setdefault(why, []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in backends.items())
    return f"no attention backend of this card keeps a {match.group(1)} KV cache ({reasons})"


def _pinned_backend(match: re.Match[str]) -> str:
    reasons = ", ".join(part.strip("'\" ") for part in match.group(2).split("',"))
    return f"the pinned attention backend {match.group(1)} can't serve this: {reasons}"


OUT_OF_MEMORY = r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)"
BACKEND_REASON = re.compile(r"(\w+): \[([^\]]+)\]")

# What is compiled at a start: FlashInfer's modules (flashinfer 0.7.0, jit/cpp_ext.py) and Triton's launchers (triton 3.7.1,
# runtime/build.py). What to do is doctor's sentence.
COMPILING: tuple[Cause, ...] = (
    _pattern(
        r"Could not find nvcc and default cuda_home|nvcc not found and PyTorch is|bin/nvcc: (?:No such|not found)",
        lambda _: NO_NVCC,
    ),
    _pattern(r"No such file or directory: 'ninja'", lambda _: NO_NINJA),
    _pattern(
        r"Failed to preprocess host compiler properties|\b[cg]\+\+: (?:command )?not found|cannot execute '?cc1plus",
        lambda _: NO_CXX,
    ),
    _pattern(
        r"unsupported GNU version! gcc versions later than (\d+)",
        r"the C++ compiler is newer than the environment's nvcc knows: set CC and CXX to version \1 (apt: g++-\1)",
    ),
    _pattern(r"Failed to find C compiler", lambda _: NO_C_COMPILER),
    _pattern(r"Python\.h: No such file", lambda _: NO_PYTHON_H),
    _pattern(
        r"libcuda\.so cannot found",
        "the driver's libcuda.so.1 isn't where the linker looks: run ldconfig, or put its folder into LD_LIBRARY_PATH",
    ),
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
    # What the card was doing is in the traceback, and decides what helps.
    _pattern(
        r"CUDA out of memory occurred when warming up sampler with (\d+) dummy requests",
        r"the card ran out of memory warming up the sampler for \1 requests: lower server.max_num_seqs or "
        "device.memory_utilization",
    ),
    _pattern(
        rf"in capture_model\b[\s\S]*?{OUT_OF_MEMORY}",
        r"the card ran out of memory capturing CUDA graphs, asking for \1 more: lower device.memory_utilization",
    ),
    _pattern(
        rf"in profile_run\b[\s\S]*?{OUT_OF_MEMORY}",
        r"the card ran out of memory in its largest step, asking for \1 more: lower server.max_num_batched_tokens",
    ),
    _pattern(
        r"Failed to load model - not enough GPU memory",
        "the card has no room for the weights: more cards (server.tensor_parallel) or smaller weights",
    ),
    _pattern(
        r"Error in memory profiling\. Initial free memory ([\d.]+) GiB, current free memory ([\d.]+) GiB",
        r"the card's free memory grew from \1 to \2 GiB while the engine measured its own: nothing else may use the card "
        "during a start",
    ),
    _pattern(OUT_OF_MEMORY, r"the card ran out of memory asking for \1 more"),
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
        r"No valid attention backend found for [^\n]*?kv_cache_dtype='?(\w+)'?[^\n]*?Reasons: \{([^\n]*)\}",
        _no_backend,
    ),
    _pattern(
        r"Selected backend (?:AttentionBackendEnum\.)?(\w+) is not valid for this configuration\. Reason: \[([^\n]*)\]",
        _pinned_backend,
    ),
    *COMPILING,
    _pattern(
        r"The NVIDIA driver on your system is too old \(found version (\d+)\)",
        lambda match: (
            f"the NVIDIA driver is too old for this engine: it runs CUDA {_cuda(match.group(1))} at most"
        ),
    ),
    _pattern(
        r"CUDA driver version is insufficient for CUDA runtime version",
        "the NVIDIA driver is too old for this engine's CUDA",
    ),
    _pattern(
        r"Driver/library version mismatch|unsupported display driver / cuda driver combination",
        "the NVIDIA driver and its library are of different versions: reload the driver or restart the machine",
    ),
    _pattern(
        r"Found no NVIDIA driver on your system|No CUDA GPUs are available|Failed to infer device type",
        "the engine finds no card that it can use",
    ),
    _pattern(
        r"no kernel image is available for execution on the device",
        "this build of the engine has no kernels for the card's architecture",
    ),
    _pattern(
        r"(?:NCCL error in: [^\n]*|NCCL error: )((?:unhandled|invalid|remote|internal)(?: \w+)*)",
        r"NCCL, which joins the cards, failed: \1 (NCCL_DEBUG=INFO says more)",
    ),
    _pattern(
        r"CUDA error: (an illegal memory access|unspecified launch failure|misaligned address)",
        r"a kernel crashed on the card: \1",
    ),
    _pattern(r"Cannot find any model weights with `([^`]+)`", r"there are no weights in \1"),
    _pattern(
        r"No such file or directory: \"?'?([^\n\"']*\.safetensors)", r"the checkpoint's file \1 is missing"
    ),
    _pattern(
        r"Error while deserializing header: ([^\n]+)",
        r"a file of the weights is cut off or damaged (\1)",
    ),
    _pattern(
        r"Following weights were not initialized from checkpoint: \{?'?([\w.]+)",
        r"the checkpoint lacks weights that the model needs, \1 among them",
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


def _cuda(code: str) -> str:
    """CUDA's version from the driver's number for it: 12020 is 12.2."""
    return f"{int(code) // 1000}.{int(code) % 1000 // 10}"


def _signal_sentence(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "it was killed by signal 9 (SIGKILL), which is what a machine without free memory does"
    return f"it was killed by signal {number} ({name})"
