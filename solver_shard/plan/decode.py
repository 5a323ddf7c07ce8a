"""A solution of a choice graph as a plan: what an assignment decides is read off it, and the evaluator prices that.

>>> PlanWriter(lowering=lowering, costs=costs, ...).plan(solution, problem, clock)      # doctest: +SKIP

Reading decides nothing and prices nothing: layouts, strategies, who gets which copy, what is kept. What that costs and needs is worked out
by :mod:`solver_shard.plan.evaluate`, which knows no choice graph, for every plan that is made; where it comes to other figures than the
graph and the solver, there is no plan but an InternalError.

The way back is :class:`Decisions`: what a plan, read from a file perhaps, decides for the nodes of a graph.
"""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver_shard import __version__
from solver_shard.clock import StageClock
from solver_shard.costs.cluster import Cluster
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.graph.liveness import ACCUMULATE, OPTIMIZER, OUTPUT, UPDATE
from solver_shard.graph.lowering import NORM_BYTES
from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.nodes import (
    AccumulateNode,
    AccumulatorNode,
    AnyNode,
    ClipNode,
    HoldNode,
    Lowering,
    Node,
    OpNode,
    ReshardNode,
    ResultNode,
    SourceNode,
    StateNode,
    TensorNode,
)
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.options import Options
from solver_shard.plan.evaluate import priced
from solver_shard.plan.plan import (
    Certificate,
    Costs,
    MemoryTimeline,
    OpCollective,
    Plan,
    PlannedOp,
    PlannedTensor,
    Provenance,
    Reshard,
    SavedTensor,
    SearchEvent,
)
from solver_shard.program import IDENTITY, Op, Relays, places, without
from solver_shard.solve.solution import Solution

_UNPRICED = Costs(compute_ns=0, update_ns=0, communication_ns=0, hidden_ns=0, total_ns=0, objective=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanWriter:
    """What a plan says beside its solution.

    Attributes:
        lowering: whose solutions are written down; ``costs`` are of it.
        origin: see ``provenance``.
        relayed: behind which tensors the lowered graph has relays.
    """

    lowering: Lowering
    costs: CostModel
    cluster: Cluster
    options: Options
    origin: Provenance
    relayed: Relays = "shared"

    def plan(self, solution: Solution, problem: Transients, clock: StageClock) -> Plan:
        """The plan of a feasible solution and what is proven of it; InternalError where its figures are not the solver's."""
        assert solution.assignment is not None, "a feasible solution has an assignment"
        plan = self.build_plan(solution.assignment)
        claimed = (solution.cost, solution.peak, solution.objective)
        evaluated = (plan.costs.total_ns, plan.memory.peak, plan.costs.objective)
        if evaluated != claimed:
            raise _unlike("the solver", claimed, evaluated)
        return replace(plan, certificate=certificate(solution, problem, clock))

    def build_plan(self, assignment: Sequence[int]) -> Plan:
        """The plan of an assignment of the lowered graph, of which nothing is proven; InternalError where it costs something else there."""
        decisions = _Assigned(self.lowering, assignment, self.costs)
        program, rules = decisions.kept.program, [self.lowering.strategies[i].rule for i in decisions.ops]
        decided = Plan(
            name=program.name,
            mesh=self.costs.mesh,
            cluster=self.cluster,
            options=self.options,
            tensors=decisions.planned_tensors(),
            ops=tuple(map(decisions.planned_op, decisions.ops)),
            outputs=program.outputs,
            gradients={program.tensors[p].name: g for p, g in program.gradients.items()},
            ties=dict(program.ties),
            reshards=tuple(map(decisions.reshard, decisions.moved)),
            holds=decisions.saved_tensors(),
            clip=decisions.clip(),
            memory=MemoryTimeline(limit=self.options.usable_memory, peak=0, peak_time=0, peak_op="", at_peak={}),
            costs=_UNPRICED,
            certificate=Certificate(objective=0, bound=0, gap=1.0, status="feasible", problem="free", seed=0, work=0),
            provenance=self.origin,
            relays=decisions.kept.relays,
            relayed=self.relayed,
        )
        plan = priced(decided, program, rules, self.costs)
        cost = int(self.lowering.graph.cost(assignment))
        if plan.costs.total_ns != cost:
            raise _unlike("the choice graph", (cost,), (plan.costs.total_ns,))
        return replace(plan, certificate=replace(plan.certificate, objective=plan.costs.objective))


class _Assigned:
    """What an assignment of the free graph decides; positions in plans are those of ``kept``, without the relays that nothing uses.

    Attributes:
        kept: the program without those.
        ops: the ops of the lowered program that are left.
        moved: the nodes of which each is a reshard of the plan.
    """

    def __init__(self, lowering: Lowering, assignment: Sequence[int], costs: CostModel) -> None:
        self.lowering, self.assignment, self.costs, self.program = lowering, assignment, costs, lowering.program
        self.mesh: Mesh = costs.mesh
        self.made = {t for op in self.program.ops for t in op.results}
        unused = frozenset(t for t in lowering.relays if not self._brings(t))
        gone = {i for t, i in places(self.program).items() if t in unused}
        self.kept = without(self.program, lowering.relays, unused)
        self.ops = [i for i in range(len(self.program.ops)) if i not in gone]
        self.moved = [n for n in lowering.nodes if isinstance(n, (ReshardNode, StateNode, AccumulateNode)) and n.tensor not in unused]

    def _brings(self, t: int) -> bool:
        """Whether the relay behind a tensor brings it to another layout."""
        node, choice = self._chosen(ReshardNode, t)
        return choice >= node.aliases

    def _chosen(self, kind: type[AnyNode], item: int, group: int = 0) -> tuple[AnyNode, int]:
        return self.lowering.node(kind, item, group), self.assignment[self.lowering.index[kind, item, group]]

    def _layout(self, kind: type[TensorNode], item: int, group: int = 0) -> Layout:
        node, choice = self._chosen(kind, item, group)
        return node.layouts[choice]

    def _produced(self, t: int) -> Layout:
        """The layout in which the producer leaves a tensor."""
        return self._layout(ResultNode if t in self.made else SourceNode, t)

    def planned_tensors(self) -> tuple[PlannedTensor, ...]:
        given = {self.kept.tensors[t]: t for t in reversed(range(len(self.program.tensors)))}  # of an unused relay the tensor before it
        return tuple(self._tensor(given[k], tensor.name) for k, tensor in enumerate(self.kept.program.tensors))

    def _tensor(self, t: int, name: str) -> PlannedTensor:
        tensor, layout = self.program.tensors[t], self._produced(t)
        for k, group in enumerate(self.lowering.lives.groups.get(t, ())):
            if t in self.made and group.purpose in (OPTIMIZER, OUTPUT):  # a source that is returned stays as it is stored
                layout = self._layout(ReshardNode, t, k)
        return PlannedTensor(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=tensor.role.value,
            layout=layout,
            trainable=tensor.trainable,
            state=self._layout(StateNode, t) if (StateNode, t, 0) in self.lowering.index else None,
        )

    def planned_op(self, i: int) -> PlannedOp:
        op, column = self.program.ops[i], self.lowering.strategies[i]
        _, k = self._chosen(OpNode, i)
        return PlannedOp(
            name=op.name,
            module=op.module,
            phase=op.phase.value,
            operands=tuple(self.kept.tensors[t] for t in op.operands),
            results=tuple(self.kept.tensors[t] for t in op.results),
            strategy=column.names(k),
            operand_layouts=tuple(c.layouts[c.chosen[k]] for c in column.operands),
            result_layouts=tuple(c.layouts[c.chosen[k]] for c in column.results),
            nanoseconds=0,
            source=column.rule.source,  # type: ignore[arg-type]  # a rule's source is one of the literal's values
            implementation=column.implementation(k),
            recompute=op.recompute,
        )

    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """What is kept of each tensor that is read in the forward pass and later: a copy of a forward group, or what was produced."""
        positions = {(node.tensor, node.group): r for r, node in enumerate(self.moved) if isinstance(node, ReshardNode)}
        saved = []
        for node in self.lowering.nodes:
            if isinstance(node, HoldNode):
                t, (_, choice) = node.tensor, self._chosen(HoldNode, node.tensor)
                reshard = positions[t, node.origins[choice]] if node.origins[choice] >= 0 else None
                layout = node.layouts[choice]
                saved.append(SavedTensor(tensor=self.kept.tensors[t], reshard=reshard, layout=layout, start=0, stop=0, nbytes=0))
        return tuple(saved)

    def clip(self) -> OpCollective | None:
        """The all-reduce of the gradient norm."""
        if (ClipNode, -1, 0) not in self.lowering.index:
            return None
        node, choice = self._chosen(ClipNode, -1)
        axes, names = node.axes[choice], tuple(self.mesh.names[a] for a in node.axes[choice])
        nanoseconds = self.costs.collective_ns("all_reduce", axes, NORM_BYTES)
        return OpCollective(kind="all_reduce", axes=names, nbytes=NORM_BYTES, nanoseconds=nanoseconds) if axes else None

    def reshard(self, node: ReshardNode | StateNode | AccumulateNode) -> Reshard:
        """How a group of readers, an accumulator or the update gets a tensor."""
        t = node.tensor
        readers: tuple[tuple[int, int], ...] = ()
        if isinstance(node, StateNode):
            purpose, family = UPDATE, UPDATE
            source, layout = self._layout(StateNode, t), self._produced(t)
            copy = source != layout
        else:
            choice = self.assignment[self.lowering.index[node.key]]
            source, layout, copy = self._produced(t), node.layouts[choice], choice >= node.aliases
            purpose, family = ACCUMULATE, ACCUMULATE
        if isinstance(node, ReshardNode):
            group = self.lowering.lives.groups[t][node.group]
            purpose, family = group.purpose, group.family
            readers = tuple((self.kept.times[i], j) for i, j in group.readers)
            if purpose == OPTIMIZER and self.lowering.microbatches > 1:
                source = self._layout(AccumulatorNode, t)
                copy = layout != source
            elif group.late:
                source = self._layout(HoldNode, t)
        return Reshard(
            tensor=self.kept.tensors[t],
            purpose=purpose,  # type: ignore[arg-type]  # a group's purpose is one of the literal's values
            family=family,
            readers=readers,
            source=source,
            layout=layout,
            copy=copy,
            bucket=self.lowering.buckets.get((t, purpose), 1),
        )


MAX_MOMENTS = 200
"""Of the course of a solve, what a plan keeps at most."""


def certificate(solution: Solution, problem: Transients, clock: StageClock, baseline: str | None = None) -> Certificate:
    """What is proven, for the tied or the free problem, with the seconds of the stages so far; and the baseline whose plan it is."""
    assert solution.objective is not None, "a feasible solution has an objective"
    assert solution.bound is not None, "a feasible solution has a bound"
    stages = {**clock.seconds, **{f"solve: {stage.name}": round(stage.seconds, 3) for stage in solution.stages}}
    status = solution.status.value
    assert status in ("optimal", "gap", "feasible")
    if solution.interrupted and status == "feasible":
        status = "interrupted"
    return Certificate(
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap or 0.0,
        status=status,  # type: ignore[arg-type]  # narrowed by the assertion above, which mypy does not follow for enums
        problem="free" if problem.folded is None else "tied",
        baseline=baseline,
        seed=solution.seed,
        work=solution.work,
        stages=stages,
        versions=_versions("ortools", "numpy"),
        ended=solution.ended if status == "feasible" else None,
        history=history(solution, clock.seconds.get("solve", 0.0) + clock.seconds.get("baselines", 0.0), baseline),
    )


def history(solution: Solution, seconds: float, baseline: str | None = None) -> tuple[SearchEvent, ...]:
    """The course of a solve that took so many seconds: only moments at which something became better, thinned evenly by their number.

    Which moments are kept depends on what was found, never on when, so that runs that find the same keep the same. Prices below that of
    the solution are left out: they were of assignments that turned out not to keep the limit.
    """
    moments: list[SearchEvent] = []
    best, bound = None, None
    for event in solution.history:
        value, proven = event.objective, event.bound
        if value is not None and solution.objective is not None and value >= solution.objective:
            best = value if best is None else min(best, value)
        if proven is not None and solution.bound is not None:
            bound = max(bound or 0, min(proven, solution.bound))
        if (best, bound) != ((moments[-1].objective, moments[-1].bound) if moments else (None, None)):
            moments.append(SearchEvent(seconds=round(event.seconds, 3), objective=best, bound=bound, source=event.source))
    if not moments or (best, bound) != (solution.objective, solution.bound):
        end = max([seconds, *(moment.seconds for moment in moments)])
        source = f"baseline {baseline}" if baseline else "the end of the search"
        moments.append(SearchEvent(seconds=round(end, 3), objective=solution.objective, bound=solution.bound, source=source))
    last = len(moments) - 1
    kept = range(last + 1) if last < MAX_MOMENTS else [k * last // (MAX_MOMENTS - 1) for k in range(MAX_MOMENTS)]
    return tuple(moments[k] for k in kept)


def _unlike(who: str, claimed: tuple[int | None, ...], evaluated: tuple[int | None, ...]) -> InternalError:
    figures = zip(("step time", "peak", "objective"), claimed, evaluated, strict=False)
    said = "; ".join(f"{name} {a} by {who}, {b} by the evaluator" for name, a, b in figures if a != b)
    return InternalError(f"{who} and the evaluator disagree: {said}; please report this, with the model and the command")


def provenance(source: str, command: str) -> Provenance:
    """Where a plan comes from: these versions, now."""
    return Provenance(
        tool=f"solver-shard {__version__}",
        versions=_versions("torch", "transformers", "ortools", "numpy"),
        command=command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source=source,
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# A plan as decisions on the nodes of a choice graph: the way back.

ORDER = (SourceNode, OpNode, StateNode, ReshardNode, AccumulateNode, HoldNode, ClipNode)
"""Kinds of nodes of which a plan says something, and what is decided first where decisions contradict each other."""


class Decisions:
    """What the plan decides for each node of a choice graph, of another program or of its own."""

    def __init__(self, plan: Plan, lowering: Lowering) -> None:
        self.plan, self.lowering, self.program = plan, lowering, lowering.program
        handing = {op.operands[0]: k for k, op in enumerate(plan.ops) if op.name == IDENTITY and op.operands[0] in plan.relays}
        handed = {i: t for t, i in places(self.program).items() if t in lowering.relays}
        planned = dict(_numbered(plan.ops, without=set(handing.values())))
        self.op_of = {i: planned[key] for key, i in _numbered(self.program.ops, without=handed) if key in planned}
        names = {tensor.name: t for t, tensor in enumerate(plan.tensors)}
        self.tensor_of = {t: names[self.program.tensors[t].name] for t in self.program.sources() if self.program.tensors[t].name in names}
        for i, k in self.op_of.items():
            if len(self.program.ops[i].results) == len(plan.ops[k].results):
                self.tensor_of.update(zip(self.program.ops[i].results, plan.ops[k].results, strict=True))
        self.unused: set[int] = set()
        for i, before in handed.items():
            if before in self.tensor_of:
                t, (after,) = self.tensor_of[before], self.program.ops[i].results
                if t in handing:
                    self.op_of[i], self.tensor_of[after] = handing[t], plan.ops[handing[t]].results[0]
                else:
                    self.unused.add(before)
                    self.tensor_of[after] = t
        for p, g in self.program.gradients.items():
            if self.program.tensors[p].name in plan.gradients:
                self.tensor_of[g] = plan.gradients[self.program.tensors[p].name]
        self.reshards = {(r.tensor, str(r.purpose), r.family): k for k, r in enumerate(plan.reshards)}
        self.holds = {hold.tensor: hold for hold in plan.holds}

    def apply(self, narrowing: Narrowing) -> tuple[int, list[str]]:
        """Narrow; how many decisions are carried, and what those are about that are not."""
        wanted: list[tuple[int, NDArray[np.bool_]]] = []
        left = []
        for kind in ORDER:
            for v, node in enumerate(self.lowering.nodes):
                if not isinstance(node, kind):
                    continue
                mask = self.mask(node)
                if mask is None or not mask.any():
                    left.append(self._about(node))
                else:
                    wanted.append((v, mask))
        if narrowing.keep(dict(wanted)):
            return len(wanted), left
        carried = 0
        for v, mask in wanted:  # they contradict each other somewhere: one by one, as far as they go
            if narrowing.keep({v: mask}):
                carried += 1
            else:
                left.append(self._about(self.lowering.nodes[v]))
        return carried, left

    def mask(self, node: Node) -> NDArray[np.bool_] | None:
        """The strategies of a node that do what the plan does; None where the plan says nothing of it."""
        if isinstance(node, OpNode):
            return self._op(node.op)
        if isinstance(node, ClipNode):
            axes = () if self.plan.clip is None else self.plan.clip.axes
            return np.array([tuple(self.plan.mesh.names[a] for a in found) == axes for found in node.axes])
        if not isinstance(node, TensorNode) or node.tensor not in self.tensor_of:
            return None
        t = self.tensor_of[node.tensor]
        if isinstance(node, ReshardNode) and node.tensor in self.unused:
            return self._aliases(node)
        if isinstance(node, SourceNode):
            return _equal(node, self.plan.tensors[t].layout)
        if isinstance(node, StateNode):
            state = self.plan.tensors[t].state
            return None if state is None else _equal(node, state)
        if isinstance(node, HoldNode):
            return self._hold(node, t)
        if isinstance(node, AccumulateNode):
            key = (t, "accumulate", "accumulate")
        elif isinstance(node, ReshardNode):
            group = self.lowering.lives.groups[node.tensor][node.group]
            key = (t, group.purpose, group.family)
        else:
            return None
        if key not in self.reshards:
            return None
        reshard = self.plan.reshards[self.reshards[key]]
        copies: NDArray[np.bool_] = np.arange(len(node.layouts)) >= node.aliases
        # from an accumulator, what is no alias may still lie in its bytes
        copied = reshard.start < reshard.stop if reshard.purpose == "optimizer" and self.lowering.microbatches > 1 else reshard.copy
        found: NDArray[np.bool_] = _equal(node, reshard.layout) & (copies if copied else self._aliases(node))
        return found

    def _aliases(self, node: ReshardNode | AccumulateNode) -> NDArray[np.bool_]:
        """The strategies that copy nothing; a gradient's way to the update has none that says so."""
        aliases: NDArray[np.bool_] = np.arange(len(node.layouts)) < node.aliases
        return aliases if node.aliases else ~aliases

    def _hold(self, node: HoldNode, t: int) -> NDArray[np.bool_] | None:
        if t not in self.holds:
            return None
        hold, origin = self.holds[t], -1
        if hold.reshard is not None:
            kept = self.plan.reshards[hold.reshard]
            groups = self.lowering.lives.groups[node.tensor]
            origin = next((k for k, g in enumerate(groups) if (g.purpose, g.family) == (kept.purpose, kept.family)), -2)
        alike: NDArray[np.bool_] = np.array([kept == origin for kept in node.origins], dtype=np.bool_)
        return _equal(node, hold.layout) & alike

    def _op(self, i: int) -> NDArray[np.bool_] | None:
        if i not in self.op_of:
            return None
        planned, column = self.plan.ops[self.op_of[i]], self.lowering.strategies[i]
        if len(planned.operands) != len(column.operands) or len(planned.results) != len(column.results):
            return None
        alike = np.ones(len(column.axis_choice), dtype=np.bool_)
        for held, layout in zip((*column.operands, *column.results), (*planned.operand_layouts, *planned.result_layouts), strict=True):
            alike &= np.array([x == layout for x in held.layouts], dtype=np.bool_)[held.chosen]
        named = np.array([column.names(int(k)) == planned.strategy for k in np.flatnonzero(alike)], dtype=np.bool_)
        if named.any():
            alike[alike] = named
        return alike

    def _about(self, node: Node) -> str:
        if isinstance(node, ClipNode):
            return "the gradient norm"
        if isinstance(node, OpNode):
            op = self.program.ops[node.op]
            return f"{op.module or 'the model'}: {op.name} ({op.phase.value})"
        assert isinstance(node, TensorNode)
        name, what = self.program.tensors[node.tensor].name, node.label
        if isinstance(node, ReshardNode):
            group = self.lowering.lives.groups[node.tensor][node.group]
            what = f"for {group.purpose} {group.family}"
        return f"{name}, {what}"


def _equal(node: TensorNode, layout: Layout) -> NDArray[np.bool_]:
    return np.array([x == layout for x in node.layouts], dtype=np.bool_)


def _numbered(ops: Sequence[Op | PlannedOp], without: Collection[int]) -> Iterator[tuple[Hashable, int]]:
    """Every other op by phase, module, name and its number among those that are alike, with its position."""
    counts: dict[Hashable, int] = {}
    for i, op in enumerate(ops):
        if i in without:
            continue
        phase = op.phase if isinstance(op, PlannedOp) else op.phase.value
        key = (phase, op.recompute, op.module, op.name)
        counts[key] = counts.get(key, 0) + 1
        yield (*key, counts[key]), i
