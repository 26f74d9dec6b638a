"""A module that `run_module` can run in tests: it ends in whichever way the request says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.errors import UserInputError
from pipeline.models.child import Progress, child_main


def work(request: dict[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "echo":
            print("said by the child")
            return {"value": request["value"]}
        case "refuse":
            raise UserInputError("wrong by the user")
        case "crash":
            raise ValueError("something broke")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "progress":
            for done in range(3):
                Progress(request["progress_file"])("counting", done + 1, 3)
                time.sleep(0.4)
            return {}
        case "sleep":
            partial = Path(request["pid_file"] + ".partial")
            partial.write_text(str(os.getpid()))
            partial.rename(request["pid_file"])
            time.sleep(3600)  # longer than the test waits for its end
    raise AssertionError(request["do"])


if __name__ == "__main__":
    sys.exit(child_main(work, sys.argv))
