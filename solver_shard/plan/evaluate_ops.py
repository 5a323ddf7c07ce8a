"""Whether the ops of a plan run as it says, and what they cost: from the program, the rules and the cost model alone."""

from __future__ import annotations

import math
from typing import NoReturn

from solver_shard.constraints import places
from solver_shard.costs.kernels import kernel_of
from solver_shard.costs.layouts import is_legal
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan
from solver_shard.program import DTYPE_BYTES, Program
from solver_shard.rulebook.rule import AxisStrategy, Rule


class OpCheck:
    """The ops of a plan: each is checked against its rule and priced anew; ``rules`` has one rule per op."""

    def __init__(self, plan: Plan, program: Program, rules: list[Rule], costs: CostModel) -> None:
        self.plan, self.program, self.rules, self.costs = plan, program, rules, costs
        self.mesh_shape = costs.mesh.shape
        self.fused = self._fused() if plan.options.fusion else set()
        self._named: dict[int, tuple[dict[str, AxisStrategy], dict[str, AxisStrategy]]] = {}

    def nanoseconds(self, i: int) -> int:
        """Check the layouts of an op against its strategies; its nanoseconds."""
        op, planned, rule = self.program.ops[i], self.plan.ops[i], self.rules[i]
        where = f"op {i} ({op.name})"
        axes = self._strategies(where, rule, planned.strategy)
        for j, t in enumerate((*op.operands, *op.results)):
            k = j - len(op.operands)
            layout = Layout(axis.operands[j] if k < 0 else axis.results[k] for axis in axes)
            found = planned.operand_layouts[j] if k < 0 else planned.result_layouts[k]
            what = f"{where}, operand {j}" if k < 0 else f"{where}, result {k}"
            if layout != found:
                illegal(f"{what} has layout {found}, but its strategies {', '.join(planned.strategy)} give {layout}")
            self.executable(t, layout, what)
        share = self._share(where, rule, axes)
        if rule.view:
            return 0
        read = [(t, planned.operand_layouts[j]) for j, t in enumerate(op.operands) if rule.needs(j)]
        written = list(zip(op.results, planned.result_layouts, strict=True))
        moved = sum(self.local_bytes(t, layout) for t, layout in (*read, *written) if t not in self.fused)
        return int(self.costs.compute_ns(rule.flops * share, moved, self._dtype(i), kernel_of(rule)))

    def inside_nanoseconds(self, i: int) -> int:
        """Nanoseconds of the collectives inside an op: those of the implementation that its axes share."""
        planned, rule = self.plan.ops[i], self.rules[i]
        where = f"op {i} ({self.program.ops[i].name})"
        axes = self._strategies(where, rule, planned.strategy)
        ways = {axis.implementation.name: axis.implementation for axis in axes if axis.implementation is not None}
        if len(ways) > 1:
            illegal(f"{where} would run two implementations at once, {' and '.join(ways)}")
        if planned.implementation != "".join(ways):
            illegal(f"{where} says it runs implementation {planned.implementation!r}, its strategies are {', '.join(planned.strategy)}")
        total = 0
        for way in ways.values():
            group = tuple(a for a, axis in enumerate(axes) if axis.implementation is not None)
            for collective in way.collectives:
                rows = math.prod(math.ceil(rule.factors[f].size / self._shards(axes, f)) for f in collective.rows)
                nbytes = rows * collective.width * DTYPE_BYTES[collective.dtype]
                total += self.costs.collective_ns(collective.kind, group, nbytes)
        return total

    def executable(self, t: int, layout: Layout, where: str, *, orders: bool = False) -> None:
        """Check that a tensor can have a layout; ``orders``: whether it may be a strided one."""
        shape = self.program.tensors[t].shape
        if not is_legal(layout, shape, self.mesh_shape, self.plan.mesh.wholes if orders else None):
            illegal(f"{where}: {list(shape)} cannot have layout {layout} on mesh {self.plan.mesh}")

    def local_bytes(self, t: int, layout: Layout, dtype: str | None = None) -> int:
        """Bytes of a tensor on the device that holds most, in its own dtype or another."""
        tensor = self.program.tensors[t]
        return math.prod(layout.local_shape(tensor.shape, self.mesh_shape)) * DTYPE_BYTES[dtype or tensor.dtype]

    def _strategies(self, where: str, rule: Rule, names: tuple[str, ...]) -> list[AxisStrategy]:
        if id(rule) not in self._named:  # ``rules`` keeps its rules, one for all ops alike
            everywhere = {strategy.name: strategy for strategy in rule.strategies()}
            self._named[id(rule)] = everywhere, everywhere | {strategy.name: strategy for strategy in rule.minor_strategies()}
        everywhere, on_parts = self._named[id(rule)]
        chosen = []
        for a, (axis, name) in enumerate(zip(self.plan.mesh.axes, names, strict=True)):
            known = on_parts if a in self.plan.mesh.inner else everywhere
            if name not in known:
                illegal(f"{where} has strategy {name!r} on axis {axis.name!r}; its rule knows {', '.join(known)}")
            if axis.size == 1 and name != "R":
                illegal(f"{where} has strategy {name!r} on axis {axis.name!r} of size 1, which can only replicate")
            chosen.append(known[name])
        if not rule.complete(chosen, self.mesh_shape):
            illegal(f"{where} has strategies {', '.join(names)}, of which one cuts below a factor that axes to the left leave in one piece")
        return chosen

    def _share(self, where: str, rule: Rule, axes: list[AxisStrategy]) -> float:
        """The part of the op's work that the busiest device does."""
        share = 1.0
        for index, factor in enumerate(rule.factors):
            shards = self._shards(axes, index)
            if not factor.legal(shards):
                illegal(f"{where} cuts its factor {factor.name!r} of size {factor.size} into {shards}")
            share *= rule.share(index, shards)
        return share

    def _shards(self, axes: list[AxisStrategy], factor: int) -> int:
        return math.prod(size for axis, size in zip(axes, self.mesh_shape, strict=True) if axis.factor == factor)

    def _dtype(self, i: int) -> str:
        op = self.program.ops[i]
        dtypes = [self.program.tensors[t].dtype for t in (*op.operands, *op.results)]
        floating = [dtype for dtype in dtypes if dtype.startswith(("f", "bf"))]
        return (floating or dtypes)[0]

    def _fused(self) -> set[int]:
        """Results that a pointwise chain hands on without memory: op by op, each asks who reads what it made."""
        chained = {i for i, rule in enumerate(self.rules) if rule.family in ("pointwise", "cast")}
        readers, made = self.program.readers(), {t: i for i, op in enumerate(self.program.ops) for t in op.results}
        kept = {*self.program.outputs, *self.program.gradients.values()}
        found = set()
        handing = places(self.program)
        for t in (t for i in sorted(chained) for t in self.program.ops[i].results):
            last, handed = t, {t}
            while last in handing:  # what it is called after the place of a pin or a relay
                (last,) = self.program.ops[handing[last]].results
                handed.add(last)
            reading = [i for i, j in readers.get(last, ()) if self.rules[i].needs(j)]
            if handed & kept or len(reading) != 1:
                continue
            i, op = reading[0], self.program.ops[reading[0]]
            alike = self.program.tensors[op.results[0]].shape == self.program.tensors[t].shape
            if i in chained and alike and op.phase is self.program.ops[made[t]].phase:
                found |= handed
        return found


def check_question(plan: Plan, program: Program, costs: CostModel) -> None:
    """Check that the plan is for this program, mesh, cluster and overlap."""
    if plan.mesh != costs.mesh:
        raise InputError(f"the plan is for mesh {plan.mesh}, the cost model for {costs.mesh}; give the plan's own mesh")
    if plan.cluster != costs.cluster:
        raise InputError(
            f"the plan is for cluster {plan.cluster.name!r}, the cost model for {costs.cluster.name!r} or another version of it"
        )
    if plan.options.overlap != costs.overlap:
        raise InputError(f"the plan is for overlap {plan.options.overlap:g}, the cost model for {costs.overlap:g}; give the plan's own")
    other = f"the plan is not for this program ({program.name!r}): "
    if (len(plan.tensors), len(plan.ops)) != (len(program.tensors), len(program.ops)):
        raise InputError(
            f"{other}it has {len(plan.tensors)} tensors and {len(plan.ops)} ops, "
            f"the program {len(program.tensors)} and {len(program.ops)}; trace the model as when the plan was made"
        )
    for planned, tensor in zip(plan.tensors, program.tensors, strict=True):
        if (planned.name, planned.shape, planned.dtype, planned.role) != (tensor.name, tensor.shape, tensor.dtype, tensor.role.value):
            raise InputError(f"{other}tensor {tensor.name!r} {tensor.dtype}{list(tensor.shape)} is {planned} in the plan")
    for i, (step, op) in enumerate(zip(plan.ops, program.ops, strict=True)):
        found = (step.name, step.operands, step.results, step.phase, step.recompute)
        if found != (op.name, op.operands, op.results, op.phase.value, op.recompute):
            raise InputError(f"{other}op {i} is {op.name}, in the plan {step.name}, or reads and makes other tensors there")
    gradients = {program.tensors[p].name: g for p, g in program.gradients.items()}
    if plan.outputs != program.outputs or dict(plan.gradients) != gradients:
        raise InputError(f"{other}its outputs or gradients are others")


def check_rules(plan: Plan, rules: list[Rule]) -> None:
    """Check that every op's rule comes from where it came from when the plan was made."""
    files = ", ".join(file.name for file in plan.options.rules)
    for i, (op, rule) in enumerate(zip(plan.ops, rules, strict=True)):
        if op.source == rule.source:
            continue
        what = f"op {i} ({op.name}) was planned by {_SOURCES[op.source]}, here it has {_SOURCES[rule.source]}"
        if op.source in ("dtensor", "unproven"):
            raise InputError(f"{what}; import the library that registers the op's strategies with DTensor first")
        raise InputError(f"{what}; the plan keeps its rules files ({files or 'none'}): use plan.options.rulebook()")


_SOURCES = {
    "table": "its shipped row",
    "user": "a row of the user's",
    "family": "the row of the op that it follows",
    "dtensor": "a strategy registered with DTensor",
    "unproven": "a strategy registered with DTensor that is not proven",
    "fallback": "no rule",
}


def illegal(problem: str) -> NoReturn:
    """Say what is not legal about a plan."""
    raise InternalError(f"the plan is not legal: {problem}")
