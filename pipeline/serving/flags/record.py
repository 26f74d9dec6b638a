"""Adds the installed vLLM's flags to `vllm.tsv`. Runs in an environment that has vLLM:

    VLLM_TARGET_DEVICE=cpu .venv/serve/bin/python -m pipeline.serving.flags.record

The parser doesn't need the compiled kernels, so another release's Python files on PYTHONPATH are enough to record it; that is
how the releases that aren't locked here came into the table. What is recorded: each long flag with the kind of value it
takes, and the values of the two flags that decide what a variant is, the KV cache's dtype and the attention backend.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pipeline.serving.flags.table import PATH, FlagTable, Row

# The module moved twice: entrypoints/openai (to 0.29), entrypoints/launchers (to 0.32), entrypoints/common (0.33).
PARSERS = ("common", "launchers", "openai")
KINDS = {"0": "switch", "None": "value", "'?'": "optional"}


def make_parser() -> Any:
    """The API server's argument parser, with all its flags."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for package in PARSERS:
        try:
            module = importlib.import_module(f"vllm.entrypoints.{package}.cli_args")
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(FlexibleArgumentParser())
    raise SystemExit(
        f"no vllm.entrypoints.{{{','.join(PARSERS)}}}.cli_args in this vLLM: where did its parser go?"
    )


def installed_flags() -> dict[str, str]:
    """Flag, or flag=value, to the kind of value it takes."""
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Hidden spellings (0.33 keeps --no-enable-x so) are in this mapping and nowhere else.
    actions = make_parser()._option_string_actions
    flags = {
        flag: KINDS.get(repr(action.nargs), "values")
        for flag, action in actions.items()
        if flag.startswith("--")
    }
    flags |= {f"--kv-cache-dtype={name}": "" for name in get_args(CacheDType)}
    return flags | {f"--attention-backend={name}": "" for name in AttentionBackendEnum.__members__}


def installed_version() -> str:
    """The release, without its build: 0.32.0 for 0.32.0+cpu."""
    from packaging.version import Version
    from vllm.version import __version__

    return Version(__version__).base_version


def main() -> None:
    version = installed_version()
    known = FlagTable.read(PATH) if PATH.exists() else FlagTable((), ())
    rows = [Row(flag, kind, (version,)) for flag, kind in installed_flags().items()]
    known.with_version(version, rows).write(PATH)
    print(f"{PATH}: {len(rows)} entries of vLLM {version}", file=sys.stderr)


if __name__ == "__main__":
    main()
