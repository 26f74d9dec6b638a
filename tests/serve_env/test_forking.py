"""An engine core that is forked: only where a fork gets through, with the API server's port closed, and saying what it runs on."""

import os
import subprocess
import sys

from pipeline.serving.cpu_plugin.plugin_path import plugin_pythonpath

# As the API server does: plugins before there is a log, then the port, then the engine core.
FORK = """
import logging, os, socket, stat, sys
import vllm.plugins
vllm.plugins.load_general_plugins()
import torch
from vllm.v1.engine import utils
if "threads" in sys.argv:
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)  # OpenMP has threads now, which no fork carries over
from pipeline.serving.cpu_plugin import forking
forking.TRIAL_S = 3.0
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # so does the platform, once it is configured
port, listener = socket.socket(), socket.create_server(("127.0.0.1", 0))
port.bind(("127.0.0.1", 0))
context = utils.get_mp_context()
print("method:", context.get_start_method(), flush=True)

def engine_core():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    vllm.plugins.load_general_plugins()
    print("ports:", [stat.S_ISSOCK(os.fstat(one.fileno()).st_mode) for one in (port, listener)], flush=True)
    torch.ones(1 << 20).add_(1.0)
    print("computed", flush=True)

if context.get_start_method() == "fork":
    core = context.Process(target=engine_core)
    core.start()
    core.join(30)
    core.kill()
"""


def run(*argv: str, **variables: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": plugin_pythonpath(),
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", FORK, *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_engine_core_computes_and_says_what_it_runs_on():
    said = run()
    assert "method: fork\n" in said and "computed\n" in said
    assert "ports: [False, False]\n" in said
    assert said.count("quantgate-cpu-plugin:") == 1


def test_where_a_fork_would_hang_it_is_started_anew():
    """PyTorch's OpenMP doesn't survive a fork once it has threads. When this fails, the trial may go."""
    assert "method: fork" not in run("threads")


def test_vllms_own_way_stays_where_nobody_asks_for_a_fork():
    assert "method: fork" not in run(VLLM_WORKER_MULTIPROC_METHOD="spawn")
