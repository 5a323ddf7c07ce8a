"""What a plan costs and needs, worked out anew from the program: the check on everything that lowering and solving did.

The evaluator shares the rules and the cost model with the solver, and nothing else: it sees no choice graph. Of the plan
it believes only decisions, which are the strategy of every op, the layouts of sources, and which readers share which
reshard. Prices, times, lives and bytes are computed again, and every decision is checked to be legal:

>>> evaluation = evaluate(plan, program, rulebook, costs)
>>> evaluation.objective == plan.certificate.objective, evaluation.peak == plan.memory.peak
(True, True)

Times are op positions. The optimizer update runs after the last op, at T; the step ends at T + 1. All lives are half-open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from solver_shard.costs.kernels import kernel_of
from solver_shard.costs.layouts import free_move, is_legal
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel
from solver_shard.costs.overlap import exposed
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Layout
from solver_shard.plan.plan import CATEGORIES, Plan, Reshard
from solver_shard.program import DTYPE_BYTES, Program, Role
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import AxisStrategy, Rule

_MIB = 2**20
_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}
_Key = tuple[int, str, str]
"""A group of readers: tensor, purpose, and how they read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The price and the memory of a plan, recomputed.

    Attributes:
        compute_ns, update_ns, communication_ns: nanoseconds of ops, optimizer and all collectives (those of reshards after
            the overlap discount).
        total_ns: their sum, the time of a step.
        objective: what the plan's options minimise: nanoseconds plus weight times peak, or bytes.
        peak: bytes per device at the fullest time.
        profile: by category, the bytes per device at each time from 0 to T.
        op_ns: nanoseconds of each op, in program order, without the collectives inside it.
        inside_ns: nanoseconds of the collectives inside each op.
        reshard_ns: nanoseconds of each reshard, in the plan's order.
    """

    compute_ns: int
    update_ns: int
    communication_ns: int
    total_ns: int
    objective: int
    peak: int
    profile: Mapping[str, tuple[int, ...]]
    op_ns: tuple[int, ...]
    inside_ns: tuple[int, ...]
    reshard_ns: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes per device at each time, all categories together."""
        return tuple(map(sum, zip(*self.profile.values(), strict=True)))


def evaluate(plan: Plan, program: Program, rulebook: Rulebook, costs: CostModel) -> Evaluation:
    """Check a plan and compute its price and memory from the program, the rules and the cost model alone.

    Args:
        program: the one that the plan was made for.
        costs: on the plan's mesh, cluster and overlap.

    Raises:
        InputError: program or cost model are not those of the plan.
        InternalError: the plan decides something that is not legal; the message names the op, tensor or reshard.
    """
    _same_question(plan, program, costs)
    return _Walk(plan, program, rulebook, costs, plan.options.optimizer_state()).run()


class _Walk:
    def __init__(self, plan: Plan, program: Program, rulebook: Rulebook, costs: CostModel, state: OptimizerState) -> None:
        self.plan, self.program, self.costs, self.state = plan, program, costs, state
        self.mesh_shape = costs.mesh.shape
        self.rules = [rulebook.rule(program, i) for i in range(len(program.ops))]
        self.update = len(program.ops)
        self.end = self.update + 1
        self.made = {t: i for i, op in enumerate(program.ops) for t in op.results}
        self.parameter_of: dict[int, list[int]] = {}
        for parameter, gradient in program.gradients.items():
            self.parameter_of.setdefault(gradient, []).append(parameter)
        self.change = {category: np.zeros(self.end + 1, dtype=np.int64) for category in CATEGORIES}

    def run(self) -> Evaluation:
        self.produced = {t: self._stored(t) for t in self.program.sources()}
        op_ns = [self._op(i) for i in range(self.update)]
        readers = self._groups()
        reshards = self._reshards_by_group(readers)
        self._all_operands_fit(reshards)
        first = {key: self._first(key, uses) for key, uses in readers.items()}
        self.base_stop = self._base_stops(first)
        update_ns = sum(self._source(t) for t in self.program.sources())
        for t, i in self.made.items():
            if not self.rules[i].view:
                self._hold(self._category(t), i, self.base_stop[t], self._bytes(t, self.produced[t]))
        reshard_ns = [0] * len(self.plan.reshards)
        for key, position in reshards.items():
            reshard_ns[position] = self._reshard(position, key, first[key], self._last(key, readers[key]))
        profile = {category: np.cumsum(change)[: self.end] for category, change in self.change.items()}
        peak = int(np.sum(list(profile.values()), axis=0).max())
        inside_ns = [self._inside(i) for i in range(self.update)]
        total = sum(op_ns) + update_ns + sum(reshard_ns) + sum(inside_ns)
        options = self.plan.options
        return Evaluation(
            compute_ns=sum(op_ns),
            update_ns=update_ns,
            communication_ns=sum(reshard_ns) + sum(inside_ns),
            total_ns=total,
            objective=peak if options.objective == "memory" else total + options.memory_weight * peak // _MIB,
            peak=peak,
            profile={category: tuple(values.tolist()) for category, values in profile.items()},
            op_ns=tuple(op_ns),
            inside_ns=tuple(inside_ns),
            reshard_ns=tuple(reshard_ns),
        )

    # Layouts and prices of ops

    def _stored(self, t: int) -> Layout:
        layout = self.plan.tensors[t].layout
        self._executable(t, layout, f"source {self.program.tensors[t].name!r}")
        if any(placement.is_partial for placement in layout):
            _illegal(f"source {self.program.tensors[t].name!r} is stored with a pending reduction, {layout}")
        return layout

    def _op(self, i: int) -> int:
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
                _illegal(f"{what} has layout {found}, but its strategies {', '.join(planned.strategy)} give {layout}")
            self._executable(t, layout, what)
            if k >= 0:
                self.produced[t] = layout
        share = self._share(where, rule, axes)
        if rule.view:
            return 0
        moved = sum(self._bytes(t, planned.operand_layouts[j]) for j, t in enumerate(op.operands) if not rule.reads or rule.reads[j]) + sum(
            self._bytes(t, planned.result_layouts[j]) for j, t in enumerate(op.results)
        )
        return int(self.costs.compute_ns(rule.flops * share, moved, self._dtype(i), kernel_of(rule)))

    def _strategies(self, where: str, rule: Rule, names: tuple[str, ...]) -> list[AxisStrategy]:
        known = {strategy.name: strategy for strategy in rule.strategies()}
        chosen = []
        for axis, name in zip(self.plan.mesh.axes, names, strict=True):
            if name not in known:
                _illegal(f"{where} has strategy {name!r} on axis {axis.name!r}; its rule knows {', '.join(known)}")
            if axis.size == 1 and name != "R":
                _illegal(f"{where} has strategy {name!r} on axis {axis.name!r} of size 1, which can only replicate")
            chosen.append(known[name])
        return chosen

    def _share(self, where: str, rule: Rule, axes: list[AxisStrategy]) -> float:
        """The part of the op's work that the busiest device does."""
        share = 1.0
        for index, factor in enumerate(rule.factors):
            shards = self._shards(axes, index)
            if not factor.legal(shards):
                _illegal(f"{where} cuts its factor {factor.name!r} of size {factor.size} into {shards}")
            share *= rule.share(index, shards)
        return share

    def _shards(self, axes: list[AxisStrategy], factor: int) -> int:
        return math.prod(size for axis, size in zip(axes, self.mesh_shape, strict=True) if axis.factor == factor)

    def _inside(self, i: int) -> int:
        """Nanoseconds of the collectives inside an op: those of the implementation that its axes share."""
        planned, rule = self.plan.ops[i], self.rules[i]
        where = f"op {i} ({self.program.ops[i].name})"
        axes = self._strategies(where, rule, planned.strategy)
        ways = {axis.implementation.name: axis.implementation for axis in axes if axis.implementation is not None}
        if len(ways) > 1:
            _illegal(f"{where} would run two implementations at once, {' and '.join(ways)}")
        if planned.implementation != "".join(ways):
            _illegal(f"{where} says it runs implementation {planned.implementation!r}, its strategies are {', '.join(planned.strategy)}")
        total = 0
        for way in ways.values():
            group = tuple(a for a, axis in enumerate(axes) if axis.implementation is not None)
            for collective in way.collectives:
                rows = math.prod(math.ceil(rule.factors[f].size / self._shards(axes, f)) for f in collective.rows)
                nbytes = rows * collective.width * DTYPE_BYTES[collective.dtype]
                total += self.costs.collective_ns(collective.kind, group, nbytes)
        return total

    def _dtype(self, i: int) -> str:
        op = self.program.ops[i]
        dtypes = [self.program.tensors[t].dtype for t in (*op.operands, *op.results)]
        floating = [dtype for dtype in dtypes if dtype.startswith(("f", "bf"))]
        return (floating or dtypes)[0]

    def _executable(self, t: int, layout: Layout, where: str) -> None:
        shape = self.program.tensors[t].shape
        if not is_legal(layout, shape, self.mesh_shape):
            _illegal(f"{where}: {list(shape)} cannot have layout {layout} on mesh {self.plan.mesh}")

    def _bytes(self, t: int, layout: Layout) -> int:
        tensor = self.program.tensors[t]
        return math.prod(layout.local_shape(tensor.shape, self.mesh_shape)) * DTYPE_BYTES[tensor.dtype]

    # Who reads what through which reshard

    def _groups(self) -> dict[_Key, list[tuple[int, int]]]:
        """The readers that must share a reshard: those of one tensor, in one phase, that read it in the same way."""
        groups: dict[_Key, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.program.ops):
            matmul = self.rules[i].matmul and op.name == "aten.einsum.default"
            for j, t in enumerate(op.operands):
                groups.setdefault((t, op.phase.value, "matmul" if matmul else op.name), []).append((i, j))
        for t in self.parameter_of:
            groups[t, "optimizer", "update"] = []
        for t in self.program.outputs:
            groups[t, "output", "output"] = []
        return groups

    def _reshards_by_group(self, readers: Mapping[_Key, list[tuple[int, int]]]) -> dict[_Key, int]:
        """Position of the one reshard of each group."""
        found: dict[_Key, int] = {}
        for position, reshard in enumerate(self.plan.reshards):
            key = (reshard.tensor, reshard.purpose, reshard.family)
            where = f"reshard {position} of {self.program.tensors[reshard.tensor].name!r} ({reshard.purpose}, {reshard.family})"
            if key not in readers:
                _illegal(f"{where}: the program has no such group of readers")
            if key in found:
                _illegal(f"{where}: reshard {found[key]} already serves this group")
            if sorted(reshard.readers) != sorted(readers[key]):
                _illegal(f"{where} has readers {list(reshard.readers)}; the group has {readers[key]}")
            found[key] = position
        for t, purpose, family in readers:
            if (t, purpose, family) not in found:
                _illegal(f"{self.program.tensors[t].name!r} has no reshard for its readers ({purpose}, {family})")
        return found

    def _all_operands_fit(self, reshards: Mapping[_Key, int]) -> None:
        for key, position in reshards.items():
            reshard = self.plan.reshards[position]
            for i, j in reshard.readers:
                asked = self.plan.ops[i].operand_layouts[j]
                if not free_move(reshard.layout, asked):
                    _illegal(
                        f"op {i} ({self.program.ops[i].name}) asks operand {j} as {asked}, but gets {self.program.tensors[key[0]].name!r} "
                        f"as {reshard.layout}, and a device cannot make the one from the other alone"
                    )

    def _reshard(self, position: int, key: _Key, first: int, stop: int) -> int:
        """Check one reshard and add its bytes; its nanoseconds."""
        (t, purpose, _), reshard = key, self.plan.reshards[position]
        tensor, produced = self.program.tensors[t], self.produced[t]
        where = f"reshard {position} of {tensor.name!r} ({reshard.purpose}, {reshard.family})"
        self._executable(t, reshard.layout, where)
        if reshard.source != produced:
            _illegal(f"{where} starts from {reshard.source}, but the tensor is produced as {produced}")
        if reshard.copy == (reshard.layout == produced):
            _illegal(f"{where} is {'a copy in' if reshard.copy else 'an alias that differs from'} the producer's layout {produced}")
        self._kept(where, key, reshard)
        category = self._category(t) if not reshard.copy else "gradients" if purpose == "optimizer" else "copies"
        self._hold(category, first if reshard.copy else self.base_stop[t], stop, self._bytes(t, reshard.layout))
        if not reshard.copy:
            return 0
        reductions = {placement.reduction for placement in (*produced, *reshard.layout) if placement.is_partial}
        path = self.costs.transitions(tensor.shape, tensor.dtype, tuple(sorted(reductions))).path(produced, reshard.layout)
        nanoseconds = sum(step.nanoseconds for step in path)
        hidden = tensor.role is Role.PARAMETER or purpose == "optimizer"
        return exposed(nanoseconds, self.costs.overlap) if hidden else nanoseconds

    def _kept(self, where: str, key: _Key, reshard: Reshard) -> None:
        """What outlives the step is whole, and a gradient is laid out as its parameter."""
        t, purpose, _ = key
        if purpose in ("optimizer", "output") and any(placement.is_partial for placement in reshard.layout):
            _illegal(f"{where} leaves a pending reduction, {reshard.layout}")
        for parameter in self.parameter_of.get(t, ()) if purpose == "optimizer" else ():
            if reshard.layout != self.produced[parameter]:
                name = self.program.tensors[parameter].name
                _illegal(f"{where} gives {reshard.layout}, but its parameter {name!r} is stored as {self.produced[parameter]}")

    # Memory over time

    def _first(self, key: _Key, uses: list[tuple[int, int]]) -> int:
        """When the reshard of a group runs."""
        t, purpose, _ = key
        if uses:
            return min(i for i, _ in uses)
        return self.made[t] if purpose == "optimizer" else self.update

    def _base_stops(self, first: Mapping[_Key, int]) -> dict[int, int]:
        """When the bytes of each tensor itself end: after the last of its reshards has run; sources stay."""
        stops = {t: i + 1 for t, i in self.made.items()}
        for (t, _, _), start in first.items():
            if t in stops:
                stops[t] = max(stops[t], start + 1)
        return stops | dict.fromkeys(self.program.sources(), self.end)

    def _last(self, key: _Key, uses: list[tuple[int, int]]) -> int:
        """One past the last use of a group; a view uses what it views as long as its results live."""
        if not uses:
            return self.end
        return max(stop for i, _ in uses for stop in self._use_stops(i))

    def _use_stops(self, i: int) -> Iterator[int]:
        yield i + 1
        if self.rules[i].view:
            yield from (self.base_stop[t] for t in self.program.ops[i].results)

    def _source(self, t: int) -> int:
        """Hold a source for the whole step, with its optimizer state; nanoseconds of its update."""
        tensor, layout = self.program.tensors[t], self.produced[t]
        self._hold(_STORED[tensor.role], 0, self.end, self._bytes(t, layout))
        if tensor.role is not Role.PARAMETER or t not in self.program.gradients:
            return 0
        elements = math.prod(layout.local_shape(tensor.shape, self.mesh_shape))
        self._hold("optimizer", 0, self.end, elements * self.state.resident_bytes(tensor.dtype))
        return int(self.costs.compute_ns(0, elements * self.state.update_bytes(tensor.dtype), tensor.dtype))

    def _category(self, t: int) -> str:
        role = self.program.tensors[t].role
        return _STORED.get(role, "gradients" if role is Role.GRADIENT else "activations")

    def _hold(self, category: str, start: int, stop: int, nbytes: int) -> None:
        if start < stop:
            self.change[category][start] += nbytes
            self.change[category][stop] -= nbytes


def _same_question(plan: Plan, program: Program, costs: CostModel) -> None:
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
        if (step.name, step.operands, step.results, step.phase) != (op.name, op.operands, op.results, op.phase.value):
            raise InputError(f"{other}op {i} is {op.name}, in the plan {step.name}, or reads and makes other tensors there")
    gradients = {program.tensors[p].name: g for p, g in program.gradients.items()}
    if plan.outputs != program.outputs or dict(plan.gradients) != gradients:
        raise InputError(f"{other}its outputs or gradients are others")


def _illegal(problem: str) -> NoReturn:
    raise InternalError(f"the plan is not legal: {problem}; please report this, with the plan")
