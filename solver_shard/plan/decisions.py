from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from solver_shard.graph.narrowing import Narrowing
from solver_shard.graph.nodes import (
    AccumulateNode,
    ClipNode,
    HoldNode,
    Lowering,
    Node,
    OpNode,
    ReshardNode,
    SourceNode,
    StateNode,
    TensorNode,
)
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan, PlannedOp
from solver_shard.program import IDENTITY, Op, places

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
