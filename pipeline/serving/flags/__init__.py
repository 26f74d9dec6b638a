"""The engine's command line by version: which flags exist, and how we say what we mean in each.

`vllm.tsv` lists every flag of every recorded release, written by `record` from the release's own parser. `table` reads it and
refuses what a version doesn't know; `changes` says, for flags that people still carry along, what became of them.
`options` maps the fields of a `ServeSpec` to flags.
"""

from pipeline.serving.flags.options import OPTIONS, Option, arguments, option_of
from pipeline.serving.flags.table import FlagTable, check_arguments, check_environment, flag_table

__all__ = [
    "OPTIONS",
    "FlagTable",
    "Option",
    "arguments",
    "check_arguments",
    "check_environment",
    "flag_table",
    "option_of",
]
