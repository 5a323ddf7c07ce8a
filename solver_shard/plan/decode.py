"""From an assignment of the choice graph to the parts of a plan: layouts, strategies, reshards with their steps, memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solver_shard import __version__
from solver_shard.clock import StageClock
from solver_shard.costs.buckets import REDUCED, Paid, launch_of, unshared_ns
from solver_shard.costs.cluster import Cluster
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.model import CostModel, exposed
from solver_shard.costs.transitions import Step as Transition
from solver_shard.costs.transitions import beyond, intermediates, update_held
from solver_shard.errors import InternalError
from solver_shard.graph.liveness import ACCUMULATE, OPTIMIZER, OUTPUT, UPDATE, Group, either_order, read_for
from solver_shard.graph.lowering import NORM_BYTES, addition_ns, conversion_ns, longest_first
from solver_shard.graph.nodes import Kind, Lowering, Node
from solver_shard.graph.strategies import spill_nanoseconds
from solver_shard.graph.transient_memory import Transients
from solver_shard.layout import Layout
from solver_shard.options import Options
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import (
    CATEGORIES,
    MOST_HOLDERS,
    Certificate,
    Costs,
    MemoryEntry,
    MemoryTimeline,
    OpCollective,
    Plan,
    PlannedOp,
    PlannedTensor,
    Provenance,
    Reshard,
    ReshardStep,
    SavedTensor,
    SearchEvent,
    collectives_of,
    runs_of,
)
from solver_shard.program import DTYPE_BYTES, Program, Relays, Role, Tensor, places, without
from solver_shard.rules.rulebook import Rulebook
from solver_shard.solve.solution import Solution, objective_value


def plan_of(lowering: Lowering, point: Sequence[int], costs: CostModel, options: Options, *, source: str = "") -> Plan:
    """The plan that a point of the free choice graph stands for, as the solver's solution becomes one; nothing of it is proven."""
    origin = Provenance(tool="solver-shard", versions={}, command="", date="", source=source)
    writer = Writer(
        program=lowering.program,
        lowering=lowering,
        costs=costs,
        cluster=costs.cluster,
        options=options,
        origin=origin,
        relayed=options.relays,
    )
    parts = writer.parts(point)
    unproven = Certificate(objective=parts.costs.objective, bound=0, gap=1.0, status="feasible", problem="free", seed=0, work=0)
    return writer.made(parts, unproven)


_STORED = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.INPUT: "inputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The parts of a plan that an assignment decides, and the program that they are of: without the relays that bring nothing elsewhere."""

    program: Program
    relays: tuple[int, ...]
    tensors: tuple[PlannedTensor, ...]
    ops: tuple[PlannedOp, ...]
    reshards: tuple[Reshard, ...]
    holds: tuple[SavedTensor, ...]
    clip: OpCollective | None
    memory: MemoryTimeline
    costs: Costs


def decode(
    lowering: Lowering,
    assignment: Sequence[int],
    costs: CostModel,
    optimizer_state: OptimizerState,
    *,
    limit: int,
    objective: str = "time",
    memory_weight: int = 0,
) -> Decoded:
    """Read layouts, strategies and reshards off an assignment of the free graph (bytes, nanoseconds)."""
    reader = _Reader(lowering, assignment, costs, optimizer_state)
    program, kept = lowering.program, reader.kept
    ops = tuple(reader.op(i) for i in range(len(program.ops)))
    moved = [node for node in lowering.nodes if node.kind in (Kind.RESHARD, Kind.STATE, Kind.ACCUMULATE) and node.item not in reader.unused]
    whole = tuple(map(reader.reshard, moved))
    intermediates = reader.intermediates(whole)
    position = {(r.tensor, str(r.purpose), r.family): k for k, r in enumerate(whole)}
    holds = tuple(reader.hold(node, position) for node in lowering.nodes if node.kind is Kind.HOLD)
    gone = {i for t, i in places(program).items() if t in reader.unused}
    ops = tuple(
        replace(op, operands=tuple(kept.tensors[t] for t in op.operands), results=tuple(kept.tensors[t] for t in op.results))
        for i, op in enumerate(ops)
        if i not in gone
    )
    reshards = tuple(
        replace(
            r,
            tensor=kept.tensors[r.tensor],
            readers=tuple((kept.times[i], j) for i, j in r.readers),
            start=kept.times[r.start],
            stop=kept.times[r.stop],
        )
        for r in whole
    )
    holds = tuple(replace(h, tensor=kept.tensors[h.tensor], start=kept.times[h.start], stop=kept.times[h.stop]) for h in holds)
    clip = reader.clip()
    memory = reader.memory(ops, limit, intermediates)
    count = lowering.microbatches
    runs = [runs_of(r.purpose, count) for r in reshards]
    compute = count * sum(op.nanoseconds for op in ops) + sum(n * r.traffic_ns for n, r in zip(runs, reshards, strict=True))
    update = sum(reader.cost(node) for node in lowering.nodes if node.kind is Kind.STATE)
    collectives = tuple(collectives_of(ops, reshards, clip, count))
    communication = sum(n * r.nanoseconds for n, r in zip(runs, reshards, strict=True))
    communication += sum(c.runs * c.nanoseconds for c in collectives if c.reshard is None)
    by_kind: dict[str, int] = {}
    for c in collectives:
        by_kind[c.kind] = by_kind.get(c.kind, 0) + c.runs * c.nanoseconds
    total = compute + update + communication
    given = {kept.tensors[t]: t for t in reversed(range(len(program.tensors)))}  # of an unused relay the tensor before it
    return Decoded(
        program=kept.program,
        relays=kept.relays,
        tensors=tuple(replace(reader.tensor(given[k]), name=tensor.name) for k, tensor in enumerate(kept.program.tensors)),
        ops=ops,
        reshards=reshards,
        holds=holds,
        clip=clip,
        memory=memory,
        costs=Costs(
            compute_ns=compute,
            update_ns=update,
            communication_ns=communication,
            hidden_ns=sum(by_kind.values()) - communication,
            total_ns=total,
            unshared_ns=reader.unshared(whole),
            objective=objective_value(objective, memory_weight, total, memory.peak),
            by_kind_ns=dict(sorted(by_kind.items())),
        ),
    )


class _Reader:
    def __init__(self, lowering: Lowering, assignment: Sequence[int], costs: CostModel, state: OptimizerState) -> None:
        self.lowering, self.assignment, self.costs, self.state = lowering, assignment, costs, state
        self.program, self.graph = lowering.program, lowering.graph
        self.mesh, self.accumulates = costs.mesh, lowering.microbatches > 1
        self.made = {t: i for i, op in enumerate(self.program.ops) for t in op.results}
        self.either = either_order(self.program)
        self.unused = frozenset(t for t in lowering.relays if not self._brings(t))
        self.kept = without(self.program, lowering.relays, self.unused)

    def _brings(self, t: int) -> bool:
        """Whether the relay behind a tensor brings it to another layout."""
        node, choice = self.chosen(Kind.RESHARD, t)
        return choice >= node.aliases

    def chosen(self, kind: Kind, item: int, group: int = 0) -> tuple[Node, int]:
        v = self.lowering.index[kind, item, group]
        return self.lowering.nodes[v], self.assignment[v]

    def cost(self, node: Node) -> int:
        v = self.lowering.index[node.kind, node.item, node.group]
        return int(self.graph.node_costs(v)[self.assignment[v]])

    def produced(self, t: int) -> Layout:
        """The layout in which the producer leaves a tensor."""
        node, choice = self.chosen(Kind.RESULT if t in self.made else Kind.SOURCE, t)
        return node.layouts[choice]

    def tensor(self, t: int) -> PlannedTensor:
        tensor, layout = self.program.tensors[t], self.produced(t)
        for k, group in enumerate(self.lowering.lives.groups.get(t, ())):
            if t in self.made and group.purpose in (OPTIMIZER, OUTPUT):  # a source that is returned stays as it is stored
                node, choice = self.chosen(Kind.RESHARD, t, k)
                layout = node.layouts[choice]
        return PlannedTensor(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=tensor.role.value,
            layout=layout,
            trainable=tensor.trainable,
            state=self.state_layout(t),
        )

    def state_layout(self, t: int) -> Layout | None:
        """Where the optimizer's state of a parameter is, if it has any."""
        if (Kind.STATE, t, 0) not in self.lowering.index:
            return None
        node, choice = self.chosen(Kind.STATE, t)
        return node.layouts[choice]

    def op(self, i: int) -> PlannedOp:
        op, column = self.program.ops[i], self.lowering.strategies[i]
        _, k = self.chosen(Kind.OP, i)
        collectives = tuple(
            OpCollective(
                kind=kind,
                axes=tuple(self.mesh.names[a] for a in axes),
                nbytes=nbytes,
                nanoseconds=self.costs.collective_ns(kind, axes, nbytes),
            )
            for kind, axes, nbytes in column.collectives(k)
        )
        whole = int(self.graph.node_costs(self.lowering.index[Kind.OP, i, 0])[k]) // self.lowering.microbatches
        return PlannedOp(
            name=op.name,
            module=op.module,
            phase=op.phase.value,
            operands=op.operands,
            results=op.results,
            strategy=column.names(k),
            operand_layouts=tuple(c.layouts[c.chosen[k]] for c in column.operands),
            result_layouts=tuple(c.layouts[c.chosen[k]] for c in column.results),
            nanoseconds=whole - sum(collective.nanoseconds for collective in collectives),
            source=column.rule.source,  # type: ignore[arg-type]  # a rule's source is one of the literal's values
            implementation=column.implementation(k),
            collectives=collectives,
            recompute=op.recompute,
        )

    def hold(self, node: Node, position: dict[tuple[int, str, str], int]) -> SavedTensor:
        """What is kept of a tensor, and when it owns bytes."""
        t, (_, choice) = node.item, self.chosen(Kind.HOLD, node.item)
        origin, layout, until = node.origins[choice], node.layouts[choice], self.lowering.lives.until(t)
        if origin >= 0:
            group = self.lowering.lives.groups[t][origin]
            start, reshard = group.stop, position[t, group.purpose, group.family]
        else:
            start, reshard = self.lowering.lives.base[t][1], None
        owns = start < until and (origin >= 0 or t in self.made)
        tensor, repeated = self.program.tensors[t], self.lowering.lives.expanded.get(t)
        if origin < 0 and repeated is not None:
            tensor = replace(tensor, shape=repeated)
        nbytes = _local_bytes(tensor, layout, self.mesh.shape) if owns else 0
        if (shared := self.in_storage(t)) is not None:
            (start, nbytes), until = shared, self.lowering.lives.held[t]
            owns = start < until and nbytes > 0
        return SavedTensor(
            tensor=t,
            reshard=reshard,
            layout=layout,
            start=start if owns else until,
            stop=until,
            nbytes=nbytes if owns else 0,
        )

    def in_storage(self, t: int) -> tuple[int, int] | None:
        """If a tensor is held in the storage of what it views: since when, and bytes if no other member of it is held longer."""
        for storage in self.lowering.lives.storages:
            longest = True
            for member in storage.members:
                keep, choice = self.chosen(Kind.KEEP, member.tensor)
                inside = choice >= len(keep.layouts) - keep.aliases
                if member.tensor == t:
                    owned = inside and longest and storage.made
                    whole = _local_bytes(self.program.tensors[storage.owner], self.produced(storage.owner), self.mesh.shape)
                    return (storage.start, whole if owned else 0) if inside else None
                longest = longest and not inside
        return None

    def stays(self, t: int, group: Group) -> bool:
        """Whether what a final group starts from is kept for another reason."""
        return group.kept and (self.in_storage(t) is not None if group.late else not self.copied(t))

    def reads_on(self, t: int, k: int, group: Group) -> bool:
        """Whether a group reads the same bytes as another one that does so longer."""
        other = self.lowering.lives.groups[t][k]
        if other.late != group.late or longest_first(other) <= longest_first(group):
            return False
        node, choice = self.chosen(Kind.RESHARD, t, k)
        return choice < node.aliases

    def start_of(self, t: int, late: bool) -> Layout:
        """The layout from which a group of readers starts."""
        if not late:
            return self.produced(t)
        node, choice = self.chosen(Kind.HOLD, t)
        return node.layouts[choice]

    def copied(self, t: int) -> bool:
        """Whether what is held of a tensor is a copy of a forward group."""
        node, choice = self.chosen(Kind.HOLD, t)
        return node.origins[choice] >= 0

    def clip(self) -> OpCollective | None:
        """The all-reduce of the gradient norm."""
        if (Kind.CLIP, -1, 0) not in self.lowering.index:
            return None
        node, choice = self.chosen(Kind.CLIP, -1)
        axes, names = node.axes[choice], tuple(self.mesh.names[a] for a in node.axes[choice])
        return OpCollective(kind="all_reduce", axes=names, nbytes=NORM_BYTES, nanoseconds=self.cost(node)) if axes else None

    def reshard(self, node: Node) -> Reshard:
        t = node.item
        if node.kind is Kind.STATE:
            end = self.lowering.lives.end
            source, layout = self.state_layout(t), self.produced(t)
            assert source is not None
            return self._reshard(t, UPDATE, UPDATE, (), source, layout, source != layout, end - 1, end - 1)
        choice = self.assignment[self.lowering.index[node.kind, t, node.group]]
        copy = choice >= node.aliases
        if node.kind is Kind.ACCUMULATE:
            made = self.lowering.lives.base[t][0]
            life = (made if copy else made + 1, made + 1)
            return self._reshard(t, ACCUMULATE, ACCUMULATE, (), self.produced(t), node.layouts[choice], copy, *life)
        group = self.lowering.lives.groups[t][node.group]
        if group.purpose == OPTIMIZER and self.accumulates:
            end, layout = self.lowering.lives.end, node.layouts[choice]
            accumulator, held = self.chosen(Kind.ACCUMULATOR, t)
            source = accumulator.layouts[held]
            return self._reshard(t, OPTIMIZER, group.family, (), source, layout, layout != source, end - 1 if copy else end, end)
        base_stop = self.lowering.lives.held[t] if group.late else self.lowering.lives.base[t][1]
        if group.late and t not in self.made and not self.copied(t):
            base_stop = group.stop  # a stored tensor that is kept as it is
        elif group.kept:
            base_stop = group.stop if self.stays(t, group) else group.start
        if not copy:
            shorter = [g.stop for k, g in enumerate(self.lowering.lives.groups[t]) if self.reads_on(t, k, group)]
            base_stop = max([base_stop, *shorter])
        start = group.start if copy else min(base_stop, group.stop)
        source = self.start_of(t, group.late)
        return self._reshard(t, group.purpose, group.family, group.readers, source, node.layouts[choice], copy, start, group.stop)

    def _reshard(
        self,
        t: int,
        purpose: str,
        family: str,
        readers: tuple[tuple[int, int], ...],
        source: Layout,
        layout: Layout,
        copy: bool,
        start: int,
        stop: int,
    ) -> Reshard:
        tensor = self.program.tensors[t]
        dtype = self.dtype(t, purpose)
        bucket = self.lowering.buckets.get((t, purpose), 1)
        steps: tuple[ReshardStep, ...] = ()
        if copy:
            steps = tuple(
                ReshardStep(
                    kind=s.kind,
                    axes=tuple(self.mesh.names[a] for a in s.axes),
                    nbytes=s.nbytes,
                    nanoseconds=s.nanoseconds,
                    before=s.before,
                    after=s.after,
                )
                for s in self.path(t, purpose, source, layout)
            )
        full = sum(s.nanoseconds for s in steps)
        hidden = tensor.role is Role.PARAMETER or purpose in (ACCUMULATE, OPTIMIZER)
        return Reshard(
            tensor=t,
            purpose=purpose,  # type: ignore[arg-type]  # a group's purpose is one of the literal's values
            family=family,
            readers=readers,
            source=source,
            layout=layout,
            copy=copy,
            steps=steps,
            bucket=bucket,
            traffic_ns=self.traffic(t, purpose, source, layout, copy),
            nanoseconds=exposed(full, self.costs.overlap) if hidden else full,
            start=start,
            stop=stop,
            nbytes=_local_bytes(tensor, layout, self.mesh.shape, dtype) if start < stop else 0,
        )

    def path(self, t: int, purpose: str, source: Layout, layout: Layout) -> tuple[Transition, ...]:
        """The steps of a copy."""
        reductions = tuple(sorted({p.reduction for x in (source, layout) for p in x if p.is_partial}))
        bucket = self.lowering.buckets.get((t, purpose), 1)
        shape, dtype = self.program.tensors[t].shape, self.dtype(t, purpose)
        return self.costs.transitions(shape, dtype, reductions, bucket, t in self.either).path(source, layout)

    def dtype(self, t: int, purpose: str) -> str:
        """In which a tensor is resharded."""
        own = self.program.tensors[t].dtype
        return self.state.gradient_dtype(own) if purpose in (ACCUMULATE, OPTIMIZER) else own

    def converts(self, t: int, purpose: str, copy: bool) -> bool:
        """Whether a gradient is converted to the reduce dtype before it is communicated."""
        fresh = purpose == ACCUMULATE or (purpose == OPTIMIZER and not self.accumulates)
        return copy and fresh and self.dtype(t, purpose) != self.program.tensors[t].dtype

    def traffic(self, t: int, purpose: str, source: Layout, layout: Layout, copy: bool) -> int:
        """What a reshard pays beside its collectives: nanoseconds of one run."""
        tensor, dtype = self.program.tensors[t], self.dtype(t, purpose)

        def size(layout: Layout, dtype: str) -> NDArray[np.int64]:
            return np.array([_local_bytes(tensor, layout, self.mesh.shape, dtype)], dtype=np.int64)

        total = 0
        if copy and t in self.lowering.fused:
            total += int(spill_nanoseconds(dtype, size(source, dtype), size(layout, dtype), self.costs)[0])
        if self.converts(t, purpose, copy):
            total += int(conversion_ns(size(source, tensor.dtype), size(source, dtype), tensor.dtype, self.costs)[0])
        if purpose == ACCUMULATE:
            total += int(addition_ns(1 - copy, size(layout, tensor.dtype), size(layout, dtype), tensor.dtype, self.costs)[0])
        return total

    def unshared(self, reshards: Sequence[Reshard]) -> int:
        """What the launches of buckets take beyond what their members pay."""
        names = {g: self.program.tensors[p].name for p, g in self.program.gradients.items()}
        steps = []
        for reshard in (reshard for reshard in reshards if reshard.bucket > 1):
            tensor = self.program.tensors[reshard.tensor]
            name = names[reshard.tensor] if reshard.purpose in REDUCED else tensor.name
            runs = runs_of(reshard.purpose, self.lowering.microbatches)
            for k, step in enumerate(reshard.steps):
                if step.nbytes:
                    axes = tuple(self.mesh.names.index(axis) for axis in step.axes)
                    launch = launch_of(reshard.purpose, name, tensor.dtype, k, step.kind, axes)
                    steps.append(
                        Paid(launch=launch, kind=step.kind, axes=axes, nbytes=step.nbytes, nanoseconds=step.nanoseconds, runs=runs)
                    )
        return exposed(unshared_ns(steps, self.costs.collective_ns), self.costs.overlap)

    def intermediates(self, reshards: Sequence[Reshard]) -> dict[int, tuple[int, int]]:
        """Time to the most bytes that one of the transitions there holds in between, and its tensor; they run one after the other.

        Of those that run before an op, what is beyond the copies and results that come after them.
        """
        before: dict[int, list[tuple[int, int, int, int]]] = {}
        tensors: dict[int, list[int]] = {}
        final = {(t, g.purpose, g.family): g for t, groups in self.lowering.lives.groups.items() for g in groups if g.final}
        found: dict[int, tuple[int, int]] = {}
        results = np.zeros(self.lowering.lives.end + 1, dtype=np.int64)
        for v, node in enumerate(self.lowering.nodes):
            taken_over = node.kind is Kind.RESULT and self.graph.node_intervals(v)[0, 0] != self.made[node.item]
            if node.kind in (Kind.RESULT, Kind.STEP) and not taken_over:
                results[self.graph.node_intervals(v)[0, 0]] += self.graph.node_usages(v)[self.assignment[v]]
        for reshard in (reshard for reshard in reshards if reshard.copy or reshard.purpose == UPDATE):
            t, purpose, dtype = reshard.tensor, reshard.purpose, self.dtype(reshard.tensor, reshard.purpose)
            converted = self.converts(t, purpose, reshard.copy)
            first = _local_bytes(self.program.tensors[t], reshard.source, self.mesh.shape, dtype) if converted else 0
            path = self.path(t, purpose, reshard.source, reshard.layout)
            held = self.update_held(reshard, path) if purpose == UPDATE else intermediates(path, first)
            time = min(reshard.start, self.lowering.lives.end - 1)
            if purpose == ACCUMULATE or (purpose == OPTIMIZER and not self.accumulates):
                found[time] = max(found.get(time, (0, 0)), (held, -t))
                results[time] += reshard.nbytes
            else:
                turn = min((j for i, j in reshard.readers if i == time), default=0)
                left = self.left(reshard, final.get((t, purpose, reshard.family)))
                before.setdefault(time, []).append((turn, held, reshard.nbytes, left))
                tensors.setdefault(time, []).append(t)
        for time, moves in before.items():
            for t, nbytes in zip(tensors[time], beyond(moves, int(results[time])), strict=True):
                found[time] = max(found.get(time, (0, 0)), (nbytes, -t))
        return {time: held for time, held in found.items() if held[0]}

    def left(self, reshard: Reshard, final: Group | None) -> int:
        """Bytes of what a final group starts from: a view's are those of what it was read from."""
        t, layout = reshard.tensor, reshard.source
        if final is None or self.stays(t, final):
            return 0
        if self.made[t] in self.lowering.lives.views and not final.late:
            t, k = read_for(self.program, self.lowering.lives, self.made, t)
            node, choice = self.chosen(Kind.RESHARD, t, k)
            layout = node.layouts[choice]
        return _local_bytes(self.program.tensors[t], layout, self.mesh.shape)

    def update_held(self, reshard: Reshard, path: tuple[Transition, ...]) -> int:
        """Bytes that the update of a parameter holds for it alone."""
        tensor = self.program.tensors[reshard.tensor]
        size = _local_bytes(tensor, reshard.source, self.mesh.shape)
        cast = size if self.state.master_bytes(tensor.dtype) else 0
        return update_held(path, cast, size // DTYPE_BYTES[tensor.dtype] * self.state.turn_bytes(tensor.dtype))

    def memory(self, ops: Sequence[PlannedOp], limit: int, intermediates: Mapping[int, tuple[int, int]]) -> MemoryTimeline:
        tensors, times = self.kept.program.tensors, self.kept.times
        end = times[self.lowering.lives.end]
        change: dict[str, NDArray[np.int64]] = {c: np.zeros(end + 1, dtype=np.int64) for c in CATEGORIES}
        held: list[tuple[int, int, int, str, str]] = []
        for v, node in enumerate(self.lowering.nodes):
            nbytes = int(self.graph.node_usages(v)[self.assignment[v]])
            for start, stop in self.graph.node_intervals(v).tolist() if nbytes else ():
                name = tensors[self.kept.tensors[node.item]].name
                held.append((times[start], times[stop], nbytes, name, self._category(node)))
        for start, (nbytes, minus_t) in intermediates.items():
            held.append((times[start], times[start] + 1, nbytes, tensors[self.kept.tensors[-minus_t]].name, "intermediates"))
        held = [life for life in held if life[0] < life[1]]
        for start, stop, nbytes, _, category in held:
            change[category][start] += nbytes
            change[category][stop] -= nbytes
        series = {c: np.cumsum(row)[:end].tolist() for c, row in change.items()}
        total = np.sum([series[c] for c in CATEGORIES], axis=0)
        peak = int(np.argmax(total))
        holders = sorted((h for h in held if h[0] <= peak < h[1]), key=lambda h: (-h[2], h[3]))[:MOST_HOLDERS]
        named = [MemoryEntry(name=h[3], category=h[4], nbytes=h[2]) for h in holders]
        return MemoryTimeline.build(series, limit=limit, ops=ops, holders=named)

    def _category(self, node: Node) -> str:
        t, tensor = node.item, self.program.tensors[node.item]
        if node.kind is Kind.SOURCE:
            return _STORED[tensor.role]
        if node.kind in (Kind.STATE, Kind.STEP):
            return "optimizer"
        if node.kind in (Kind.ACCUMULATE, Kind.ACCUMULATOR):
            return "gradients"
        if node.kind is Kind.KEEP and node.group:
            return "copies"
        if node.kind in (Kind.TAIL, Kind.RESHARD) and self.lowering.lives.groups[t][node.group].late and self.copied(t):
            return "copies"
        if node.kind is Kind.RESHARD and self.lowering.lives.groups[t][node.group].purpose == OPTIMIZER:
            return "gradients"
        if node.kind is Kind.RESHARD and self.chosen(node.kind, t, node.group)[1] >= node.aliases:
            return "copies"
        return "gradients" if tensor.role is Role.GRADIENT else "activations"


def _local_bytes(tensor: Tensor, layout: Layout, mesh_shape: Sequence[int], dtype: str | None = None) -> int:
    """Bytes of the largest shard, in the tensor's dtype or another."""
    return math.prod(layout.local_shape(tensor.shape, mesh_shape)) * DTYPE_BYTES[dtype or tensor.dtype]


# A solution of a choice graph written down as a plan, with its certificate and where it comes from.
#
# >>> Writer(program=program, lowering=lowering, ...).plan(solution, problem, clock)      # doctest: +SKIP

MAX_MOMENTS = 200
"""Of the course of a solve, what a plan keeps at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writer:
    """What a plan says beside its solution.

    Attributes:
        program: that was lowered; ``lowering`` and ``costs`` are of it.
        origin: see ``provenance``.
        relayed: behind which tensors the lowered graph has relays.
    """

    program: Program
    lowering: Lowering
    costs: CostModel
    cluster: Cluster
    options: Options
    origin: Provenance
    relayed: Relays = "shared"

    def parts(self, assignment: Sequence[int]) -> Decoded:
        """Layouts, prices and memory of an assignment of the lowered graph."""
        return decode(
            self.lowering,
            assignment,
            self.costs,
            self.options.optimizer_state(),
            limit=self.options.usable_memory,
            objective=self.options.objective,
            memory_weight=self.options.memory_weight,
        )

    def plan(self, solution: Solution, problem: Transients, clock: StageClock) -> Plan:
        """The plan of a feasible solution and what is proven of it; InternalError where its figures are not the solver's."""
        assert solution.assignment is not None, "a feasible solution has an assignment"
        parts = self.parts(solution.assignment)
        claimed = (solution.cost, solution.peak, solution.objective)
        written = (parts.costs.total_ns, parts.memory.peak, parts.costs.objective)
        if written != claimed:
            raise _unlike("the solver", claimed, "the plan", written)
        return self.made(parts, certificate(solution, problem, clock))

    def check(self, plan: Plan, rulebook: Rulebook) -> None:
        """Hold a finished plan against the evaluator; InternalError where its figures are others."""
        used = {t for t in self.lowering.relays if t in plan.relays}
        kept = without(self.program, self.lowering.relays, self.lowering.relays - used)
        found = evaluate(plan, kept.program, rulebook, self.costs)
        claimed = (plan.costs.total_ns, plan.memory.peak, plan.certificate.objective)
        evaluated = (found.total_ns, found.peak, found.objective)
        if evaluated != claimed:
            raise _unlike("the plan", claimed, "the evaluator", evaluated)

    def made(self, parts: Decoded, proof: Certificate) -> Plan:
        """A plan of these parts."""
        program = parts.program
        return Plan(
            name=program.name,
            mesh=self.costs.mesh,
            cluster=self.cluster,
            options=self.options,
            tensors=parts.tensors,
            ops=parts.ops,
            outputs=program.outputs,
            gradients={program.tensors[p].name: g for p, g in program.gradients.items()},
            ties=dict(program.ties),
            reshards=parts.reshards,
            holds=parts.holds,
            clip=parts.clip,
            memory=parts.memory,
            costs=parts.costs,
            certificate=proof,
            provenance=self.origin,
            relays=parts.relays,
            relayed=self.relayed,
        )


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


def _unlike(one: str, claimed: tuple[int | None, ...], other: str, found: tuple[int | None, ...]) -> InternalError:
    figures = zip(("step time", "peak", "objective"), claimed, found, strict=True)
    said = "; ".join(f"{name} {a} by {one}, {b} by {other}" for name, a, b in figures if a != b)
    return InternalError(f"{one} and {other} disagree: {said}; please report this, with the model and the command")


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
