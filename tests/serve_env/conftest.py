"""Tests that need PyTorch and vLLM: run by the serve environment's Python, not collected elsewhere."""

import importlib.util
import os

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
