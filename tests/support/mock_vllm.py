"""A mock vLLM server: the real wire format, scripted behaviour, no engine. For tests of the load, quality and serving
code that must not wait for a model.

In process (a thread with its own event loop; ready on entry):

    with start_mock(ttft_s=0.05, itl_s=0.01) as mock:
        requests.post(f"{mock.base_url}/v1/completions", json={"model": mock.served_name, ...})
        mock.requests        # bodies of the completion requests so far, in order of arrival
        mock.arrived_s       # for each of them when it came, on time.monotonic's clock
        mock.sent_s          # for each of them when each of its tokens' events was sent, if it was streamed
        mock.die()           # close the listener and every open connection at once, as a dying engine does

As a process that stands in for the engine's own interpreter (`serve(spec, python=fake_python(tmp_path, ...))`), or by
hand with vLLM's flags, unknown ones ignored:

    python -m tests.support.mock_vllm --port 8000 --served-model-name demo --script '{"ttft_s": 0.05}'

Endpoints: /health, /version, /v1/models, /tokenize, /metrics, /v1/completions (streaming or not; string, list of strings,
ids, list of ids; echo, logprobs, prompt_logprobs). Requests wait in a first-come queue for KV blocks: a request holds
ceil((prompt + max_tokens) / block_size) of the pool's blocks, one of which is the engine's null block, and at most
max_num_seqs run. Tokens are counted with the model folder's tokenizer.json where `model` has one, else one per word;
generated text and logprobs are functions of the prompt's text alone (and of `seed`).

`mock_vllm_server.Script` lists what can be scripted. Faults that name a request count completion requests from 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.support import mock_vllm_wire as wire
from tests.support.mock_vllm_server import MockServer, Script
from tests.support.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]

__all__ = ["MockServer", "Script", "fake_python", "start_mock"]


@contextlib.contextmanager
def start_mock(**script: Any) -> Iterator[MockServer]:
    """A mock in this process, listening on a free port; keywords are the fields of `Script`."""
    mock = MockServer(Script(**script), in_process=True)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(mock.listen(0))
        ready.set()
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, name="mock-vllm", daemon=True)
    thread.start()
    if not ready.wait(PATIENCE_S):
        raise RuntimeError("the mock did not start")
    try:
        yield mock
    finally:
        loop.call_soon_threadsafe(mock.drop_everything)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def fake_python(folder: Path, **script: Any) -> Path:
    """An executable that takes the place of the serve environment's Python: `-m vllm… FLAGS` starts the mock instead.

    The flags that the launcher passes (port, name, lengths, KV bytes) are honoured, `script` adds the behaviour; beside the
    fields of `Script` it may have `kappa_bytes`, and `profiled_tokens`: the pool that a card's profiling finds where no bytes are
    given, by --max-num-seqs.
    """
    path = folder / "python"
    command = [sys.executable, "-m", "tests.support.mock_vllm", "--script", json.dumps(script)]
    text = f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(REPOSITORY))}\n"
    text += (
        f'case "$2" in vllm.*) shift 2; exec {shlex.join(command)} "$@" ;; esac\nexec {sys.executable} "$@"\n'
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- as a process -----------------------------------------------------------------------------------------------


def _parse(argv: list[str]) -> tuple[Script, int]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", dest="served_name")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument(
        "--enable-prefix-caching", dest="prefix_caching", action=argparse.BooleanOptionalAction
    )
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--kappa-bytes", type=int, default=23_040)  # SmolLM2-135M in BF16: 2·30·3·64·2
    parser.add_argument("--script", default="{}")
    known, _ = parser.parse_known_args(argv)
    values = {item.name: getattr(known, item.name, None) for item in fields(Script)}
    values = {name: value for name, value in values.items() if value is not None} | json.loads(known.script)
    kappa_bytes, profiled = values.pop("kappa_bytes", known.kappa_bytes), values.pop("profiled_tokens", {})
    if known.kv_cache_memory_bytes is None and profiled:
        values["kv_cache_tokens"] = profiled[str(known.max_num_seqs)]
    elif known.kv_cache_memory_bytes and "kv_cache_tokens" not in values:
        kappa = kappa_bytes // (2 if str(values.get("kv_cache_dtype")).startswith("fp8") else 1)
        block = values.get("block_size", Script.block_size)
        values["kv_cache_tokens"] = known.kv_cache_memory_bytes // (kappa * block) * block
    return Script(**values), known.port


async def _serve_forever(mock: MockServer, port: int) -> None:
    script = mock.script
    print(script.extra_log, flush=True)
    await asyncio.sleep(script.startup_s)
    await mock.listen(port)
    name = script.model or script.served_name
    for line in wire.startup_log(
        name, script.kv_cache_tokens, script.max_model_len, script.kv_cache_dtype, mock.port
    ):
        print(line, flush=True)
    await asyncio.Event().wait()


def main(argv: list[str]) -> int:
    """Entry point of `python -m tests.support.mock_vllm`."""
    script, port = _parse(argv)
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    for _ in range(script.stray_children):
        subprocess.Popen(sleeper, start_new_session=True)
    if script.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if script.exit_at_start is not None:
        print(script.exit_at_start, flush=True)
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_forever(MockServer(script, in_process=False), port))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
