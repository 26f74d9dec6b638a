"""Our AutoAWQ module without the copy of the state: what AutoAWQ 0.2.9 does to a model on a CPU by itself."""

from __future__ import annotations

import sys
from typing import Any

from pipeline.models.child import child_main
from pipeline.quantize import autoawq


def run(request: dict[str, Any]) -> dict[str, Any]:
    autoawq._copy_state = lambda *_: None
    return autoawq.run(request)


if __name__ == "__main__":
    sys.exit(child_main(run, sys.argv))
