"""`vllm bench serve` as it is, but for its prompts: what our driver is compared with. Runs in the serve environment.

Each line of stdin is the arguments of one run as a JSON list; "done" is printed after each. The prompts come from
`--dataset-path`, as for ours, because the generator's own data sets need a tokenizer and would send other requests.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def samples(args: Any, tokenizer: Any) -> list[Any]:
    """One request per line of the file."""
    from vllm.benchmarks.datasets import SampleRequest

    with open(args.dataset_path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        SampleRequest(
            prompt=row["prompt"],
            prompt_len=len(row["prompt"]),
            expected_output_len=row["output_tokens"],
            request_id=f"{index}",
        )
        for index, row in enumerate(rows)
    ]


def main() -> None:
    """Run until stdin ends."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve.get_samples = samples
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    answers.write("ready\n")
    for line in sys.stdin:
        serve.main(parser.parse_args(json.loads(line)))
        answers.write("done\n")


if __name__ == "__main__":
    main()
