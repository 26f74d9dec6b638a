"""Cards through NVML: which there are, what holds their memory, how hot and how fast they run.

NVML comes with the driver and `nvidia-ml-py` only binds to it, so on a machine without one everything here answers "no
cards" and nothing fails. Tests hand in a library that answers from recorded readings.
"""

from pipeline.gpu.load import GpuSampler, summarise
from pipeline.gpu.nvml import NoDriver, Nvml, open_nvml, read_gpus
from pipeline.gpu.selection import chosen, engine_environment, lowest_capability, visible

__all__ = [
    "GpuSampler",
    "NoDriver",
    "Nvml",
    "chosen",
    "engine_environment",
    "lowest_capability",
    "open_nvml",
    "read_gpus",
    "summarise",
    "visible",
]
