"""Globally optimal sharding of PyTorch models under a memory limit, with a proof.

>>> import solver_shard
>>> plan = solver_shard.optimize("gpt2", batch=16, seq=1024, mesh="8", cluster="h100")
>>> print(plan)
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "InfeasibleError",
    "Layout",
    "Mesh",
    "Plan",
    "Program",
    "SolverShardError",
    "apply",
    "load_cluster",
    "load_plan",
    "optimize",
    "trace",
    "verify",
]

_HOMES = {
    "Cluster": "costs.cluster",
    "InfeasibleError": "errors",
    "Layout": "layout",
    "Mesh": "mesh",
    "Plan": "plan.plan",
    "Program": "program",
    "SolverShardError": "errors",
    "apply": "runtime.apply",
    "load_cluster": "costs.cluster",
    "load_plan": "plan.io",
    "optimize": "api",
    "trace": "tracing.torch",
    "verify": "verification",
}
"""Where each public name lives; imported on first use, so that ``import solver_shard`` loads neither torch nor numpy."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
