"""What the nodes of a lowered choice graph mean, and what narrows it: pins and restrictions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from solver_shard.choice.graph import ChoiceGraph
from solver_shard.choice.groups import Lives
from solver_shard.choice.strategies import OpStrategies
from solver_shard.choice.tables import Layouts
from solver_shard.costs.memory import OptimizerState
from solver_shard.layout import Layout
from solver_shard.program import Program

Pins = Mapping[int, Callable[[Layout], bool]]
"""Tensor position to a predicate that tells which layouts the user allows."""


class Restriction(Protocol):
    """Narrows the choice graph to what a template or another plan does; every answer must be the same on every call."""

    def source(self, t: int, layout: Layout) -> bool:
        """Whether a parameter, buffer or input may be stored so."""

    def state(self, p: int, layout: Layout) -> bool:
        """Whether a parameter's optimizer state may be stored so."""

    def accumulator(self, t: int, layout: Layout) -> bool:
        """Whether the accumulator of a gradient may be laid out so."""

    def keeps_copies(self, t: int) -> bool:
        """Whether a copy that the forward pass made may be kept for the backward pass."""

    def scope(self, t: int, purpose: str) -> Hashable:
        """A key of tensors and purposes for which ``moves`` answers alike."""

    def moves(self, scope: Hashable, sources: Layouts, targets: Layouts) -> NDArray[np.bool_]:
        """Which transitions may be used, by source and target; staying as it is is always allowed."""


class Kind(enum.Enum):
    """What a node of the choice graph decides."""

    SOURCE = "source"
    OP = "op"
    RESULT = "result"
    RESHARD = "reshard"
    TAIL = "tail"
    HOLD = "hold"
    KEEP = "keep"
    STORAGE = "storage"
    STATE = "state"
    STEP = "step"
    ACCUMULATE = "accumulate"
    ACCUMULATOR = "accumulator"
    CLIP = "clip"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One node: ``item`` is the op position for OP, the tensor position otherwise; ``group`` counts the tensor's groups.

    ``layouts`` has the layout of every strategy (not for OP and CLIP). The first ``aliases`` strategies of a RESHARD or
    ACCUMULATE are aliases; of the way from an accumulator to the update, those that stay in the accumulator's bytes. A
    HOLD's ``origins`` say what each strategy keeps: -1 the producer's bytes, k the copy of the tensor's group k. Strategy
    0 of a TAIL or KEEP has no bytes; a KEEP's ``group`` is one more than the origin; its last ``aliases`` strategies keep the tensor in
    the storage of what it views, whose bytes a chain of STORAGE nodes owns (see ``solver_shard.choice.storage``). Of a TAIL the ``aliases``
    after strategy 0 are the group's own, of a kept group's after strategy 1 (see ``solver_shard.choice.tails``). A STEP has what the
    optimizer's step holds of a parameter, by the layout of its STATE. The one CLIP belongs to no tensor, ``item`` is -1; its strategies
    are the ``axes`` over which the gradient norm is summed.
    """

    kind: Kind
    item: int
    group: int = 0
    layouts: Layouts = ()
    aliases: int = 0
    origins: tuple[int, ...] = ()
    axes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowering:
    """A choice graph and what its nodes mean."""

    program: Program
    graph: ChoiceGraph
    nodes: tuple[Node, ...]
    index: Mapping[tuple[Kind, int, int], int]
    strategies: tuple[OpStrategies, ...]
    lives: Lives
    buckets: Mapping[tuple[int, str], int]
    fused: frozenset[int]
    microbatches: int = 1
    optimizer_state: OptimizerState
    reduced: Mapping[int, str] = field(default_factory=dict)
    """The dtype in which each gradient is reduced."""
    relays: frozenset[int] = frozenset()
    """Tensors behind which the program has a relay: a place that is no pin's, which a plan leaves out where it brings nothing elsewhere."""
