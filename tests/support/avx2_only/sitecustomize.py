"""Makes every Python process with this folder on its PYTHONPATH believe that its processor has AVX2 and nothing newer.

So a machine with AVX-512 can show what happens on one without: PyTorch reports the reduced set before vLLM chooses its
kernel library (`_C_AVX2`), and the kernels of PyTorch and oneDNN that choose for themselves are held to AVX2 as well.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from types import MappingProxyType

os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
NEWER = ("avx512", "avx10", "amx", "avx_vnni")


class _Reduced(Loader):
    """Loads torch.cpu as usual, then takes the newer instruction sets out of what it reports."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        found = module.get_capabilities
        module.get_capabilities = lambda: MappingProxyType(
            {name: value for name, value in found().items() if not name.startswith(NEWER)}
        )


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch.cpu":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Reduced(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
