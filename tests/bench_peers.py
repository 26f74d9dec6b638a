"""Capacity by other planners, by ours and by the engine's own sizing, for the same five cases, side by side.

The peers need a hub for their command lines, so their own functions are called with the same config.json, in an environment of
their own that is thrown away. The engine's column is vLLM's sizing code in the serve environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from pipeline.capacity import GIB, EngineRules, Geometry, kv_layout
from tests.support.environments import environment_python
from tests.support.geometries import ALL

PEERS = ("llm-cal==0.2.0", "vllm-wizard==0.2.0", "hf-mem==0.5.6")
THEIR_NEEDS = (
    "pydantic",
    "pyyaml",
    "rich",
    "typer",
    "httpx",
    "httpx2[http2]",
    "packaging",
    "platformdirs",
    "diskcache",
    "safetensors",
    "huggingface-hub",
)
POOL_BYTES = 4 * GIB
LENGTH = 4096
CASES = (
    ("qwen2.5-7b", "bfloat16"),
    ("qwen2.5-7b", "fp8"),
    ("gemma-3-1b", "bfloat16"),
    ("gpt-oss-20b", "bfloat16"),
    ("deepseek-v2-lite", "bfloat16"),
)

ASK_PEERS = """
import json, sys
def llm_cal(config, fp8, length):
    from llm_cal.architecture.detector import detect
    from llm_cal.architecture.formulas.kv_cache import compute_kv_cache_bytes
    return compute_kv_cache_bytes(detect(config), length, 1 if fp8 else 2).value
def vllm_wizard(config, fp8, length):
    from vllm_wizard.models.metadata import _parse_config
    from vllm_wizard.planning.memory import compute_kv_cache_memory
    from vllm_wizard.schemas.inputs import DType, KVCacheDType
    kv = next(d for d in KVCacheDType if "fp8" in d.value) if fp8 else KVCacheDType.AUTO
    return compute_kv_cache_memory(_parse_config(config, "x"), length, 1, kv, DType.AUTO)
def hf_mem(config, fp8, length):
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
    return compute_safetensors_kv_cache_size(config, "F8_E4M3" if fp8 else "BF16", length)
answers = []
for config, fp8, length in json.load(sys.stdin):
    row = {}
    for name, ask in (("llm-cal", llm_cal), ("vllm-wizard", vllm_wizard), ("hf-mem", hf_mem)):
        try:
            row[name] = ask(config, fp8, length)
        except Exception as error:
            row[name] = f"{type(error).__name__}"
    answers.append(row)
print(json.dumps(answers))
"""

ASK_ENGINE = """
import json, sys, os, tempfile
from pathlib import Path
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from tests.serve_env.test_kv_oracle import Engine
answers = []
for config, dtype, length, pool in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder) / "model", config, 16).use(dtype, length=length)
        answers.append(engine.capacity([pool])[2])
print("ANSWERS " + json.dumps(answers))
"""


def main() -> None:
    """Print the table; a peer that can't be installed here is said so."""
    peers = _peers([[ALL[name], dtype == "fp8", LENGTH] for name, dtype in CASES])
    engine = _engine([[ALL[name], dtype, LENGTH, POOL_BYTES] for name, dtype in CASES])
    rules = EngineRules(block_size=16, kernel_block=32, concurrent_batches=1)
    names = [peer.split("==")[0] for peer in PEERS]
    print(f"sequences of {LENGTH:,} tokens in a pool of {POOL_BYTES // GIB} GiB")
    print(f"{'case':28}" + "".join(f"{name:>14}" for name in [*names, "ours", "the engine"]))
    for (name, dtype), answers, reported in zip(CASES, peers, engine, strict=True):
        ours = (
            kv_layout(Geometry.from_config(ALL[name]), dtype, rules).pool(POOL_BYTES, LENGTH).logged_sequences
        )
        cells = [_sequences(answers.get(peer)) for peer in names] + [f"{ours:.2f}", f"{reported:.2f}"]
        print(f"{name + ', ' + dtype:28}" + "".join(f"{cell:>14}" for cell in cells))


def _sequences(size: Any) -> str:
    if isinstance(size, int | float) and size:
        return f"{POOL_BYTES / size:.2f}"
    return str(size or "no answer")


def _peers(questions: list[list[Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        for options in (["--no-deps", *PEERS], list(THEIR_NEEDS)):
            done = subprocess.run(
                [python, "-m", "pip", "install", "--quiet", *options],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"the peers can't be installed here: {done.stderr.strip().splitlines()[-1]}")
                return [{} for _ in questions]
        return json.loads(_ask([python, "-c", ASK_PEERS], questions))


def _engine(questions: list[list[Any]]) -> list[float]:
    answer = _ask([str(environment_python("serve")), "-c", ASK_ENGINE], questions)
    return json.loads(answer.split("ANSWERS ", 1)[1])


def _ask(command: list[str], questions: list[list[Any]]) -> str:
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        command, input=json.dumps(questions), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:1])}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


if __name__ == "__main__":
    main()
