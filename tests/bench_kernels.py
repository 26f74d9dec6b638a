"""A CPU's kernels side by side in one run: the engine's own, the plugin's and BF16's, on the demo model's shapes.

It is the comparison that `kernels: measured` makes (pipeline/serving/kernel_choice.py), printed whole and not kept.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.environments.needed import environments_of
from pipeline.errors import QuantgateError
from pipeline.serving.kernel_choice import NAMES, compare_now, from_times
from pipeline.settings import load_settings
from pipeline.stages.environment import describe_machine
from tests.support.environments import environment_python

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the tables; a CPU without the stock kernels has nothing to compare."""
    settings = load_settings(["profile=demo"], ROOT)
    machine = describe_machine(environments_of(settings))
    if "avx512f" not in machine.cpu_flags:
        print("no AVX-512: int4 and FP8 KV have the plugin's kernels only")
        return
    try:
        compared = compare_now(settings, environment_python("serve"))
    except QuantgateError as error:
        print(f"not compared: {error}")
        return
    for part, steps in compared.items():
        print(
            f"{NAMES[part]}, microseconds a layer (stock 1 : plugin : BF16); measured would take {from_times(steps).taken}"
        )
        for step in steps:
            ratios = f"1 : {step.plugin_us / step.stock_us:.2f} : {step.bf16_us / step.stock_us:.2f}"
            print(
                f"  {step.tokens:>4} tokens {step.stock_us:10,.0f} {step.plugin_us:10,.0f} {step.bf16_us:10,.0f}   {ratios}"
            )


if __name__ == "__main__":
    main()
