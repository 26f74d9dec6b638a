"""Forks the engine core off the API server, which has imported all that it needs: 6 of a start's 16 s on 2 cores.

Forking is vLLM's own default (envs.py 0.32), but on a CPU it insists on a new interpreter, because a worker of its own can be bound to
cores only before OpenMP starts. Here nothing is bound and there is no such worker (`command`). What a fork doesn't carry over is
OpenMP's threads: had the API server computed anything on several, the engine core would wait for them without an end. So a fork
is tried first, by a child that computes something and is gone; where it hangs, the engine core is started as vLLM would.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
TRIAL_S = 10.0
PARALLEL_ELEMENTS = 1 << 20  # PyTorch gives each thread 32,768 of an element-wise operation
logger = logging.getLogger("vllm.quantgate")  # a child of vLLM's logger: its handlers and prefixes


def install() -> None:
    """Have the engine core forked where the variable says so and vLLM would not. Idempotent."""
    if os.environ.get(VARIABLE) != "fork":
        return
    from vllm.v1.engine import utils

    original = utils.get_mp_context
    if getattr(original, "_quantgate_fork", False):
        return

    @functools.wraps(original)
    def get_mp_context() -> Any:
        if not survives_fork(_compute, TRIAL_S):
            logger.warning("a forked engine core would hang in OpenMP: it is started anew")
            return multiprocessing.get_context("spawn")
        from vllm import plugins

        plugins.plugins_loaded = False  # the engine core loads them for itself, and says so in its log
        return multiprocessing.get_context("fork")

    get_mp_context._quantgate_fork = True  # type: ignore[attr-defined]
    utils.get_mp_context = get_mp_context


def survives_fork(work: Callable[[], object], timeout_s: float) -> bool:
    """Whether a forked child of this process gets through `work` in time."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def leave_port() -> None:
    """Let go of the API server's port in the engine core, which was forked with it open: a client of a dead server would wait for an
    answer instead of being refused. The port is bound by then, not listened at."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the folder's own number
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_port(number):
                os.dup2(nothing, number)  # not closed: an object of the API server's has the number
    os.close(nothing)


def _is_port(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        try:
            one.getpeername()
        except OSError:
            return one.getsockname()[1] != 0
        return False


def _compute() -> None:
    import torch

    torch.ones(PARALLEL_ELEMENTS).add_(1.0)
