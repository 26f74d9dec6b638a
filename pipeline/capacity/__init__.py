"""Capacity arithmetic: geometry -> kappa -> budget -> concurrency. Pure functions of plain numbers, no I/O.

Symbols follow one formula, N = floor((u*V - W - A - O) / (kappa*S)):
u memory utilization, V device memory, W weights, A peak activation, O framework overhead (CUDA context, graphs),
kappa KV bytes per token, S tokens per sequence.
"""

from pipeline.capacity.budget import Budget, kv_budget_bytes
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import KvPool, kappa_bytes, kv_pool
from pipeline.capacity.weights import WeightScheme, weight_bytes

__all__ = [
    "Budget",
    "Geometry",
    "KvPool",
    "WeightScheme",
    "kappa_bytes",
    "kv_budget_bytes",
    "kv_pool",
    "weight_bytes",
]
