"""Globally optimal sharding of PyTorch models under a memory limit, with a proof.

>>> import solver_shard
>>> plan = solver_shard.optimize("gpt2", batch=16, seq=1024, mesh="8", cluster="h100")
>>> print(plan)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that type checkers and editors see what __getattr__ gives
    from solver_shard.analysis.compare import compare
    from solver_shard.analysis.explain import explain
    from solver_shard.analysis.greedy_plans import propagate
    from solver_shard.analysis.other_tools import read_parallelize, read_tp_plan
    from solver_shard.analysis.sweep import sweep
    from solver_shard.analysis.sweep.results import load_sweep
    from solver_shard.api import optimize
    from solver_shard.costs.cluster import Cluster, load_cluster
    from solver_shard.errors import InfeasibleError, InputError, InternalError, RuleError, SolverShardError, TraceError
    from solver_shard.expander.expander import expand
    from solver_shard.expander.single_axis import register_single_axis_strategy
    from solver_shard.exporters import export, read_pins
    from solver_shard.layout import Layout
    from solver_shard.mesh import Mesh
    from solver_shard.plan.io import load_plan, save_plan
    from solver_shard.plan.plan import Plan
    from solver_shard.program import Program
    from solver_shard.reports.html import report
    from solver_shard.reports.timeline import chrome_trace, timeline, write_trace
    from solver_shard.rules.rulebook import Rulebook
    from solver_shard.runtime.apply import apply, recorded_collectives
    from solver_shard.runtime.optimizer import ShardedOptimizer, clip_grad_norm_
    from solver_shard.shardy.stablehlo import propagate_module
    from solver_shard.solve.graph_file import solve_graph
    from solver_shard.tracing.torch import trace
    from solver_shard.verification import verify
    from solver_shard.verification.measurement import measure

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
    "measure",
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
    "measure": "verification.measurement",
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
