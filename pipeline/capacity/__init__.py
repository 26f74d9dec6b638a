"""Capacity arithmetic: geometry -> kappa -> budget -> concurrency, and the inverse problem. Plain numbers, no I/O.

Symbols follow one formula, N = floor((u*V - W - A - O) / (kappa*S)):
u memory utilization, V device memory, W weights, A peak activation, O framework overhead (CUDA context, graphs),
kappa KV bytes per token, S tokens per sequence.
"""

from pipeline.capacity.budget import GIB, Budget, Card, Term
from pipeline.capacity.geometry import Geometry
from pipeline.capacity.kv import KV_CACHE_DTYPES, kappa_bytes
from pipeline.capacity.plan import HandCalculation, Row, explain, plan_row
from pipeline.capacity.pool import EngineRules, KvPool, Layout, kv_layout
from pipeline.capacity.weights import BF16, Method, WeightScheme, rank_weight_bytes, weight_bytes

__all__ = [
    "BF16",
    "GIB",
    "KV_CACHE_DTYPES",
    "Budget",
    "Card",
    "EngineRules",
    "Geometry",
    "HandCalculation",
    "KvPool",
    "Layout",
    "Method",
    "Row",
    "Term",
    "WeightScheme",
    "explain",
    "kappa_bytes",
    "kv_layout",
    "plan_row",
    "rank_weight_bytes",
    "weight_bytes",
]
