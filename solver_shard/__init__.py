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
    "InputError",
    "InternalError",
    "Layout",
    "Mesh",
    "Plan",
    "Program",
    "RuleError",
    "Rulebook",
    "ShardedOptimizer",
    "SolverShardError",
    "TraceError",
    "apply",
    "chrome_trace",
    "clip_grad_norm_",
    "compare",
    "expand",
    "explain",
    "export",
    "load_cluster",
    "load_plan",
    "load_sweep",
    "optimize",
    "propagate",
    "propagate_module",
    "read_parallelize",
    "read_pins",
    "read_tp_plan",
    "recorded_collectives",
    "register_single_axis_strategy",
    "report",
    "save_plan",
    "solve_graph",
    "sweep",
    "timeline",
    "trace",
    "verify",
    "write_trace",
]

_HOMES = {
    "Cluster": "costs.cluster",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "InternalError": "errors",
    "Layout": "layout",
    "Mesh": "mesh",
    "Plan": "plan.plan",
    "Program": "program",
    "RuleError": "errors",
    "Rulebook": "rules.rulebook",
    "ShardedOptimizer": "runtime.optimizer",
    "SolverShardError": "errors",
    "TraceError": "errors",
    "apply": "runtime.apply",
    "chrome_trace": "reports.timeline",
    "clip_grad_norm_": "runtime.optimizer",
    "compare": "analysis.compare",
    "expand": "expander.expander",
    "explain": "analysis.explain",
    "export": "exporters",
    "load_cluster": "costs.cluster",
    "load_plan": "plan.io",
    "load_sweep": "analysis.sweep.results",
    "optimize": "api",
    "propagate": "analysis.greedy_plans",
    "propagate_module": "shardy.stablehlo",
    "read_parallelize": "analysis.other_tools",
    "read_pins": "exporters",
    "read_tp_plan": "analysis.other_tools",
    "recorded_collectives": "runtime.apply",
    "register_single_axis_strategy": "expander.single_axis",
    "report": "reports.html",
    "save_plan": "plan.io",
    "solve_graph": "solve.graph_file",
    "sweep": "analysis.sweep",
    "timeline": "reports.timeline",
    "trace": "tracing.torch",
    "verify": "verification",
    "write_trace": "reports.timeline",
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
