"""Tables of the choice graph that say what fits together: 0 where two strategies may be chosen, forbidden elsewhere.

Rows are the strategies of the edge's first node, columns those of its second (the classes are in ``graph/nodes.py``).
:mod:`solver_shard.graph` says what each table is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver_shard.costs.layouts import free_moves
from solver_shard.costs.transitions import FORBIDDEN
from solver_shard.graph.choice_graph import Bools, Ints
from solver_shard.graph.nodes import PRODUCED, Layouts
from solver_shard.graph.strategies import LayoutColumn
from solver_shard.layout import Layout, R


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


def stays_table(stays: Bools, aliases: int) -> Ints:
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
    own = np.array(origins) == PRODUCED
    table[:, 0] = 0
    table[own, -1] = 0
    for r in np.flatnonzero(~own).tolist():
        table[r, [1 + k for k, layout in enumerate(kept) if layout == held[r]]] = 0
    return table


def free_table(rows: Layouts, columns: Layouts) -> Ints:
    """Moves without communication."""
    return np.where(free_moves(rows, columns), 0, FORBIDDEN).astype(np.int64)


def stepped_table(stored: Layouts, states: Layouts) -> Ints:
    """A stored parameter against what is stepped of it: a part of its own bytes wherever a device stores what it steps, else a copy."""
    own = free_moves(stored, states)
    return np.where(np.concatenate([own, ~own], axis=1), 0, FORBIDDEN).astype(np.int64)


def hold_table(given: Layouts, aliases: int, origin: int, layouts: Layouts, origins: tuple[int, ...]) -> Ints:
    """What a producer or a forward group allows to be held: only what it has, and a group only its copies."""
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


def in_place_table(held: Layouts, need: Layouts, moves: Ints) -> Ints:
    """The way from an accumulator to the update: in its own bytes where they hold the result, else to a copy.

    ``moves`` has the transitions' costs, (held, need); the table's columns are ``need`` twice.
    """
    whole = tuple(Layout(R if p.is_partial else p for p in layout) for layout in held)
    inside = free_moves(whole, need)
    return np.concatenate([np.where(inside, moves, FORBIDDEN), np.where(inside, FORBIDDEN, moves)], axis=1)


def reshard_table(held: Layouts, alias: Layouts, need: Layouts, moves: Ints) -> Ints:
    """What a group starts from against its reshard: as it is at no cost, or a copy at the cost of the transition, ``moves`` (held, need).

    A slice is a copy, too: it takes no time, has bytes of its own, and lets the whole tensor go. A copy in the layout that is held already
    would be a clone, which no plan has: the alias has the same bytes, from where the producer's own end.
    """
    same = equal_table(held, need) == 0
    return np.concatenate([equal_table(held, alias), np.where(same, FORBIDDEN, moves)], axis=1)


def norm_table(groups: Sequence[tuple[int, ...]], states: Layouts) -> Ints:
    """A norm that is summed over some axes may leave out none that cuts a state."""
    cut = [{a for a, placement in enumerate(layout) if placement.is_shard} for layout in states]
    return np.array([[0 if axes <= set(group) else FORBIDDEN for axes in cut] for group in groups], dtype=np.int64)


def member_table(origins: tuple[int, ...], n: int, reasons: int) -> Ints:
    """What is held, against what is kept: nothing of a copy, the layout that is held otherwise."""
    table = np.full((len(origins), 1 + n * (reasons + 1)), FORBIDDEN, dtype=np.int64)
    position = 0
    for row, origin in enumerate(origins):
        if origin != PRODUCED:
            table[row, 0] = 0
        else:
            table[row, 1 + position :: n] = 0
            position += 1
    return table


def copied_table(aliases: int, size: int, k: int, reasons: int, n: int) -> Ints:
    """Read ``k`` on the way, against reasons: an earlier one was a copy, this one, a later one, or (the last two) none was."""
    table = np.zeros((size, 1 + n * (reasons + 1)), dtype=np.int64)
    for reason in range(k, reasons + 1):
        columns = slice(1 + n * reason, 1 + n * (reason + 1))
        table[: aliases if reason == k else 0, columns] = FORBIDDEN
        table[aliases if reason > k else size :, columns] = FORBIDDEN
    return table


def sliced_table(sizes: Ints, whole: Ints, reasons: int) -> Ints:
    """The owner's bytes, against reasons: in the storage is what has its part of them, the last reason is that it has not."""
    n = len(whole)
    table = np.zeros((len(sizes), 1 + n * (reasons + 1)), dtype=np.int64)
    part = sizes[:, None] == whole
    table[:, 1 + n * (reasons - 1) : 1 + n * reasons] = np.where(part, FORBIDDEN, 0)
    table[:, 1 + n * reasons :] = np.where(part, 0, FORBIDDEN)
    return table


def storage_table(alone: int, whole: Ints, classes: Ints, shorter: bool) -> Ints:
    """A member against its link of the chain: needed for it, with these bytes; else nothing, or needed for a longer one."""
    c = len(classes)
    table = np.full((alone + len(whole), 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[:alone, 0] = 0
    table[:alone, 1 + c :] = 0 if shorter else FORBIDDEN
    table[alone:, 1 : 1 + c] = np.where(whole[:, None] == classes, 0, FORBIDDEN)
    return table


def longer_table(c: int) -> Ints:
    """A link against the next shorter one: what is needed longer is there before, and what is not must be needed for itself."""
    table = np.full((1 + 2 * c, 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[0, : 1 + c] = 0
    for size in range(c):
        for row in (1 + size, 1 + c + size):
            table[row, [1 + size, 1 + c + size]] = 0
    return table


def chain_table(above: Layouts, below: Layouts, aliases: int, stored: bool) -> Ints:
    """A tail against the next shorter one, of so many ``aliases``: bytes that are there longer are there before."""
    table = np.full((len(above), len(below)), FORBIDDEN, dtype=np.int64)
    own, end = 1 + aliases, len(below) - stored
    table[0, :own] = 0  # nothing above: what is there is for the group itself
    for row in range(1, len(above) - stored):
        table[row, [x for x in range(1, end) if below[x] == above[row]]] = 0
    if stored:
        table[0, -1] = 0
        table[-1, [0, -1]] = 0
    return table


def ahead_table(aliases: int, copies: int) -> Ints:
    """A group's strategies against the bytes of its copies, strategy 0 having none: an alias has none, a copy its own."""
    table = np.full((aliases + copies, 1 + copies), FORBIDDEN, dtype=np.int64)
    table[:aliases, 0] = 0
    table[aliases + np.arange(copies), 1 + np.arange(copies)] = 0
    return table


def behind_table(held: int) -> Ints:
    """What a gradient is made as against the bytes that its reduction starts from: none (strategy 0), or those of that layout."""
    table = np.full((held, 1 + held), FORBIDDEN, dtype=np.int64)
    table[:, 0] = 0
    table[np.arange(held), 1 + np.arange(held)] = 0
    return table


def reduced_table(aliases: int, copies: int, held: int) -> Ints:
    """How a gradient goes on against the bytes that its reduction starts from: as it is without them, as a copy with them."""
    table = np.full((aliases + copies, 1 + held), FORBIDDEN, dtype=np.int64)
    table[:aliases, 0] = 0
    table[aliases:, 1:] = 0
    return table
