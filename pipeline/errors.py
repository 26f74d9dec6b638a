"""The three ways a run can end badly, each with its exit code.

A message is one clear sentence for the person at the terminal; a traceback is never the message.
`run_main` is the single place where an exception becomes an exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


class QuantgateError(Exception):
    """Base class. `exit_code` is what the process returns."""

    exit_code = 1


class UserInputError(QuantgateError):
    """The user's input is wrong: the message names the file, the key, the value and what is allowed."""

    exit_code = 2


class EnvironmentUnfitError(QuantgateError):
    """This machine or environment can't do it: the message says what is missing and how to get it."""

    exit_code = 3


class EngineFailedError(QuantgateError):
    """The engine failed: the message carries the cause found in its log and the log's path."""

    exit_code = 4


def run_main(main: Callable[[], int | None]) -> int:
    """Run `main` and turn what it raises into an exit code and one sentence on stderr."""
    try:
        return main() or 0
    except QuantgateError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; finished results are kept, run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return EnvironmentUnfitError.exit_code
    except Exception as error:  # a defect of ours: the trace goes to a file, the sentence to the user
        from pipeline.files import write_text

        path = write_text("runs/traceback.log", traceback.format_exc())
        print(
            f"error: unexpected {type(error).__name__}: {error}; the trace is in {path}, please report it",
            file=sys.stderr,
        )
        return QuantgateError.exit_code
