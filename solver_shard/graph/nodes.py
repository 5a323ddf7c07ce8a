"""What the nodes of a lowered choice graph mean, and what narrows it: pins and restrictions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from solver_shard.costs.layouts import free_moves
from solver_shard.costs.memory import OptimizerState
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import ChoiceGraph, Ints
from solver_shard.graph.liveness import Lives
from solver_shard.graph.strategies import LayoutColumn, OpStrategies
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
    the storage of what it views, whose bytes a chain of STORAGE nodes owns (see ``solver_shard.graph.lowering``). Of a TAIL the ``aliases``
    after strategy 0 are the group's own, of a kept group's after strategy 1 (see ``lowering.add_tails``). A STEP has what the
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


# Tables of the choice graph that say what fits together: 0 where two strategies may be chosen, forbidden elsewhere.
#
# Rows are the strategies of the edge's first node, columns those of its second.

Layouts = tuple[Layout, ...]
"""Distinct layouts in a fixed order: the strategies of a node, or the columns of a table."""


def equal_table(rows: Sequence[Layout], columns: Sequence[Layout]) -> Ints:
    """The same layout on both sides."""
    position = {layout: k for k, layout in enumerate(columns)}
    table = np.full((len(rows), len(columns)), FORBIDDEN, dtype=np.int64)
    for r, layout in enumerate(rows):
        if layout in position:
            table[r, position[layout]] = 0
    return table


def result_table(result: LayoutColumn, kept: Layouts) -> Ints:
    """An op's strategies against the layouts of one of its results."""
    return equal_table(result.layouts, kept)[result.chosen]


def tail_table(alias: int, copies: int, longer: int, stored: bool) -> Ints:
    """An alias prolongs the bytes it reads, a copy nobody's: those ``longer`` are there for another group.

    Strategy 0 and, where ``stored``, the last one have no bytes.
    """
    table = np.full((alias + copies, 1 + alias + longer + stored), FORBIDDEN, dtype=np.int64)
    table[np.arange(alias), 1 + np.arange(alias)] = 0
    table[:alias, 1 + alias + longer :] = 0
    table[alias:, 0] = 0
    table[alias:, 1 + alias : 1 + alias + longer] = 0
    return table


def stays_table(stays: np.ndarray, aliases: int) -> Ints:
    """Whether what a final group reads stays anyway, against its tail: strategy 0 where it does, else 1, without bytes, or its own."""
    table = np.full((len(stays), 2 + aliases), FORBIDDEN, dtype=np.int64)
    table[stays, 0] = 0
    table[~stays, 1:] = 0
    return table


def kept_table(aliases: int, copies: int) -> Ints:
    """A final group's reshard against that tail: an alias has its bytes where they do not stay, a copy none."""
    table = np.full((aliases + copies, 2 + aliases), FORBIDDEN, dtype=np.int64)
    table[:, 0] = 0
    table[np.arange(aliases), 2 + np.arange(aliases)] = 0
    table[aliases:, 1] = 0
    return table


def stored_table(held: Layouts, origins: tuple[int, ...], kept: Layouts) -> Ints:
    """Whose bytes an alias of what is held of a stored tensor prolongs: a copy's, in a layout of ``kept``, or (last strategy) nobody's."""
    table = np.full((len(held), 2 + len(kept)), FORBIDDEN, dtype=np.int64)
    own = np.array(origins) < 0
    table[:, 0] = 0
    table[own, -1] = 0
    for r in np.flatnonzero(~own).tolist():
        table[r, [1 + k for k, layout in enumerate(kept) if layout == held[r]]] = 0
    return table


def free_table(rows: Layouts, columns: Layouts) -> Ints:
    """Moves without communication."""
    return np.where(free_moves(rows, columns), 0, FORBIDDEN).astype(np.int64)


def hold_table(given: Layouts, aliases: int, origin: int, layouts: Layouts, origins: tuple[int, ...]) -> Ints:
    """What a producer (origin -1) or a forward group allows to be held: only what it has, and a group only its copies."""
    table = np.zeros((len(given), len(layouts)), dtype=np.int64)
    own = np.array(origins) == origin
    table[:, own] = equal_table(given, tuple(layout for layout, mine in zip(layouts, own, strict=True) if mine))
    table[:aliases, own] = FORBIDDEN
    return table


def keep_table(layouts: Layouts, origins: tuple[int, ...], origin: int, kept: Layouts) -> Ints:
    """What a hold keeps of one origin; column 0 where it keeps another's."""
    position = {layout: 1 + k for k, layout in enumerate(kept)}
    table = np.full((len(layouts), 1 + len(kept)), FORBIDDEN, dtype=np.int64)
    for r, (layout, where) in enumerate(zip(layouts, origins, strict=True)):
        table[r, position[layout] if where == origin else 0] = 0
    return table


def read_table(given: Layouts, asked: LayoutColumn, exact: bool = False) -> Ints:
    """A reshard's layouts against what the reader's strategies ask for; ``exact``: the reader hands on just what it gets."""
    table = equal_table(given, asked.layouts) if exact else np.where(free_moves(given, asked.layouts), 0, FORBIDDEN)
    return table[:, asked.chosen].astype(np.int64)
