"""The nodes of a lowered choice graph, a class per kind; the lowering that says what each one decides.

A node is found by its key: its class, the tensor (or op) that it is of, and, where a tensor has several of a kind, which of its groups of
readers it serves.

>>> lowering.index[ReshardNode, t, k]               # doctest: +SKIP
812
>>> lowering.node(ReshardNode, t, k).aliases        # doctest: +SKIP
3

:mod:`solver_shard.graph` states the problem that they make up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar, cast

from solver_shard.costs.memory import OptimizerState
from solver_shard.graph.choice_graph import ChoiceGraph, Masks
from solver_shard.graph.liveness import Group, Lives
from solver_shard.graph.strategies import OpStrategies
from solver_shard.layout import Layout
from solver_shard.program import Program

Layouts = tuple[Layout, ...]
"""Distinct layouts in a fixed order: the strategies of a node, or the columns of a table."""

Pins = Mapping[int, Callable[[Layout], bool]]
"""Tensor position to a predicate that tells which layouts the user allows."""


PRODUCED = -1
"""As an origin: what is held is what the producer made, not the copy of a group of readers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """What all nodes have.

    Attributes:
        label: of the class: how messages and names of nodes call it.
    """

    label: ClassVar[str]

    @property
    def key(self) -> NodeKey:
        """Where ``Lowering.index`` has it."""
        raise NotImplementedError

    @property
    def strategies(self) -> Hashable:
        """What its strategies mean; nodes of one class that have the same may share a decision."""
        raise NotImplementedError


NodeKey = tuple[type[Node], int, int]
"""Class; tensor, or op of an ``OpNode``, or -1; group of readers, or origin of a ``KeepNode``, else 0."""

AnyNode = TypeVar("AnyNode", bound=Node)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpNode(Node):
    """Which strategy an op runs: those of ``Lowering.strategies[op]``."""

    label = "op"
    op: int

    @property
    def key(self) -> NodeKey:
        return OpNode, self.op, 0

    @property
    def strategies(self) -> Hashable:
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClipNode(Node):
    """Over which mesh axes the gradient norm is summed: one set of ``axes`` per strategy. There is one such node, or none."""

    label = "clip"
    axes: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> NodeKey:
        return ClipNode, -1, 0

    @property
    def strategies(self) -> Hashable:
        return self.axes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorNode(Node):
    """A node that is about one tensor: strategy s is about it in ``layouts[s]``."""

    tensor: int
    layouts: Layouts

    @property
    def key(self) -> NodeKey:
        return type(self), self.tensor, 0

    @property
    def strategies(self) -> Hashable:
        return self.layouts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceNode(TensorNode):
    """How a parameter, buffer or input is stored."""

    label = "source"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResultNode(TensorNode):
    """In which layout an op leaves one of its results."""

    label = "result"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateNode(TensorNode):
    """How the optimizer's state of a parameter is stored; ``tensor`` is the parameter."""

    label = "state"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MasterNode(TensorNode):
    """What is stepped of a parameter, in the layout of its state: with the first half of ``layouts`` a part of what is stored, with
    the same ones again a copy beside it, where a device does not store what it steps."""

    label = "master"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNode(TensorNode):
    """What the optimizer's step holds of a parameter, by the layout of its state."""

    label = "step"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccumulatorNode(TensorNode):
    """The buffer in which a gradient is summed over microbatches."""

    label = "accumulator"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StorageNode(TensorNode):
    """The bytes of a storage, as long as one member of it is the longest that needs it; ``layouts`` say nothing."""

    label = "storage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccumulateNode(TensorNode):
    """The way of a microbatch's gradient to its accumulator; with the first ``aliases`` strategies it is added as it was made."""

    label = "accumulate"
    aliases: int

    @property
    def strategies(self) -> Hashable:
        return self.layouts, self.aliases


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HoldNode(TensorNode):
    """What is held of a tensor for its later readers: by strategy, what its producer made (``PRODUCED``) or the copy of a forward group."""

    label = "hold"
    origins: tuple[int, ...]

    @property
    def strategies(self) -> Hashable:
        return self.layouts, self.origins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeepNode(TensorNode):
    """The bytes of what is held, where it is of this ``origin``; strategy 0 has none.

    With the last ``stored`` strategies the tensor is kept in the storage of what it views, whose bytes its ``StorageNode`` has.
    """

    label = "keep"
    origin: int
    stored: int = 0

    @property
    def key(self) -> NodeKey:
        return KeepNode, self.tensor, self.origin

    @property
    def strategies(self) -> Hashable:
        return self.layouts, self.stored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupNode(TensorNode):
    """A node that is about one group of a tensor's readers, by its position in ``Lives.groups``.

    Attributes:
        aliases: how many strategies read the tensor as it is.
    """

    group: int
    aliases: int

    @property
    def key(self) -> NodeKey:
        return type(self), self.tensor, self.group

    @property
    def strategies(self) -> Hashable:
        return self.layouts, self.aliases


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReshardNode(GroupNode):
    """In which layout a group reads: with the first ``aliases`` strategies the bytes that it starts from, with the others a copy.

    On the way from an accumulator to the update the first ones stay in the accumulator's bytes.
    """

    label = "reshard"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TailNode(GroupNode):
    """The bytes of what a group reads as it is, from where its owner's own end.

    Strategy 0 has none; the ``aliases`` after it are the group's own (of a group that is final and kept: after strategy 1, which has none
    either), those after them another group's that reads longer.
    """

    label = "tail"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AheadNode(GroupNode):
    """The bytes of a copy while it is brought beside another window: before its group reads it, or after a gradient is made.

    Strategy 0 has none. The group is ``PRODUCED`` where the copy is a gradient's on its way to the accumulator.
    """

    label = "ahead"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BehindNode(TensorNode):
    """The bytes of what the reduction of a gradient starts from, while it runs beside the window after; strategy 0 has none."""

    label = "behind"


def group_of(node: TensorNode, lives: Lives) -> Group | None:
    """The group of readers that a node serves, or whose copy it keeps."""
    k = node.group if isinstance(node, GroupNode) else node.origin if isinstance(node, KeepNode) else PRODUCED
    return None if k == PRODUCED else lives.groups[node.tensor][k]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowering:
    """A choice graph and what its nodes mean.

    Attributes:
        nodes: one per node of the graph.
        index: key of a node to its position.
        strategies: of every op.
        buckets: by tensor and purpose, how many tensors share the launches of a transition.
        reduced: the dtype in which each gradient is reduced.
        relays: tensors behind which the program has a relay: a place that is no pin's, which a plan leaves out where it brings nothing
            elsewhere.
    """

    program: Program
    graph: ChoiceGraph
    nodes: tuple[Node, ...]
    index: Mapping[NodeKey, int]
    strategies: tuple[OpStrategies, ...]
    lives: Lives
    buckets: Mapping[tuple[int, str], int]
    fused: frozenset[int]
    microbatches: int = 1
    optimizer_state: OptimizerState
    reduced: Mapping[int, str] = field(default_factory=dict)
    relays: frozenset[int] = frozenset()

    def narrowed(self, masks: Masks) -> Lowering:
        """The lowering with all other strategies forbidden."""
        return replace(self, graph=self.graph.narrowed(masks))

    def node(self, kind: type[AnyNode], item: int, group: int = 0) -> AnyNode:
        """The node of this key; KeyError where there is none."""
        return cast(AnyNode, self.nodes[self.index[kind, item, group]])

    def op_node(self, v: int) -> OpNode:
        """The node at a position where an op is."""
        return cast(OpNode, self.nodes[v])

    def tensor_node(self, v: int) -> TensorNode:
        """The node at a position where no op and no gradient norm is."""
        return cast(TensorNode, self.nodes[v])
