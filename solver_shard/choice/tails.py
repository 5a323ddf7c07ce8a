"""What readers of a tensor as it is keep of it beyond its own life: once, however many groups of readers there are.

A tensor's own bytes end when the last of its groups of readers has begun (see :mod:`solver_shard.choice.groups`). A group that reads it
as an alias goes on until its own last reader, and the bytes are there until then. Several such groups read the same bytes:

    x ──own bytes──► 6                    the last group has begun
      products (alias) ─────► 9           [6, 9) are bytes of the products' tail
      sums     (alias) ──────────► 12     [9, 12) are bytes of the sums'
      slices   (copy) ───► 7              has bytes of its own

So the tails of one tensor are a chain, the longest first: each has the bytes from the end of the next shorter one to its own, if its group
reads the tensor as it is or a longer one does. After a hold the same is true of what is held. Where that is a stored tensor, as it is
stored, the bytes are there anyway.

A final group has the bytes itself, unless they may be kept for another reason: then its tail has them where they are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.choice.groups import Group
from solver_shard.choice.nodes import Kind, Node
from solver_shard.choice.tables import Layouts, kept_table, stays_table, stored_table, tail_table
from solver_shard.layout import Layout

if TYPE_CHECKING:
    from solver_shard.choice.lower import _Lowerer


def add_tails(low: _Lowerer, t: int) -> None:
    """The tails of a tensor whose reshards are all there: those that start from what its producer made, and from what is held."""
    for late in (False, True):
        stop = low.lives.base[t][1] if not late else low.lives.held.get(t, 0)
        groups = [(g, k) for k, g in enumerate(low.lives.groups[t]) if g.late == late and g.stop > stop and not g.final]
        groups = [(g, k) for g, k in groups if _aliases(low, t, k)]
        _add_chain(low, t, sorted(groups, key=lambda pair: longest_first(pair[0])), stop)


def add_kept(low: _Lowerer, t: int) -> None:
    """The tails of a held tensor's final groups: without bytes where what they read as it is stays as held, or in a storage."""
    for k, group in enumerate(low.lives.groups[t]):
        alias = _aliases(low, t, k) if group.kept else ()
        if not alias:
            continue
        other = low.index[Kind.KEEP if group.late else Kind.HOLD, t, 0]
        node, reshard = low.nodes[other], low.index[Kind.RESHARD, t, k]
        size = len(node.layouts)
        stays = np.arange(size) >= size - node.aliases if group.late else np.array(node.origins) < 0
        usages = np.concatenate([[0, 0], low._bytes(t, alias)])
        aliases, copies = len(alias), len(low.nodes[reshard].layouts) - len(alias)
        tail = Node(kind=Kind.TAIL, item=t, group=k, layouts=(Layout(), Layout(), *alias), aliases=aliases)
        v = low._add(tail, np.zeros_like(usages), usages, (group.start, group.stop))
        low._edge(other, v, ("stays", stays.tobytes(), aliases), lambda s=stays, n=aliases: stays_table(s, n))  # type: ignore[misc]
        low._edge(reshard, v, ("kept", aliases, copies), lambda n=aliases, c=copies: kept_table(n, c))  # type: ignore[misc]


def longest_first(group: Group) -> tuple[int, int, str, str]:
    """By what the groups of a chain are sorted: as evaluators of plans do, whose groups have names and no numbers."""
    return -group.stop, group.start, group.purpose, group.family


def _aliases(low: _Lowerer, t: int, k: int) -> Layouts:
    """The layouts in which a group may read a tensor as it is; none of a gradient that its accumulator or reduce dtype takes away."""
    v = low.index[Kind.RESHARD, t, k]
    node = low.nodes[v]
    return node.layouts[: node.aliases] if low.node_intervals[v][1] == low.lives.groups[t][k].stop else ()


def _add_chain(low: _Lowerer, t: int, groups: list[tuple[Group, int]], base_stop: int) -> None:
    longer: Layouts = ()
    before: int | None = None
    for j, (group, k) in enumerate(groups):
        start = groups[j + 1][0].stop if j + 1 < len(groups) else base_stop
        reshard, alias = low.index[Kind.RESHARD, t, k], _aliases(low, t, k)
        stored = group.late and t not in low.made  # kept as it is, it stays anyway: one more strategy, without bytes
        bytes_of = (*alias, *longer)
        usages = np.concatenate([[0], low._bytes(t, bytes_of), [0] * stored]).astype(np.int64)
        node = Node(kind=Kind.TAIL, item=t, group=k, layouts=(Layout(), *bytes_of, *(Layout(),) * stored), aliases=len(alias))
        v = low._add(node, np.zeros_like(usages), usages, (start, group.stop))
        sizes = (len(alias), len(low.nodes[reshard].layouts) - len(alias), len(longer), stored)
        low._edge(reshard, v, ("tail", sizes), lambda s=sizes: tail_table(*s))  # type: ignore[misc]
        if stored:
            held = low.index[Kind.HOLD, t, 0]
            given, origins = low.nodes[held].layouts, low.nodes[held].origins
            low._edge(held, v, ("stored", given, origins, bytes_of), lambda g=given, o=origins, x=bytes_of: stored_table(g, o, x))  # type: ignore[misc]
        if before is not None:
            above, below = low.nodes[before], low.nodes[v]
            key = ("chain", above.layouts, below.layouts, len(alias), stored)
            low._edge(before, v, key, lambda a=above, b=below, s=stored: _chain_table(a, b, s))  # type: ignore[misc]
        longer = tuple(dict.fromkeys(bytes_of))
        before = v


def _chain_table(above: Node, below: Node, stored: bool) -> Ints:
    """A tail against the next shorter one: bytes that are there longer are there before."""
    table = np.full((len(above.layouts), len(below.layouts)), FORBIDDEN, dtype=np.int64)
    own, end = 1 + below.aliases, len(below.layouts) - stored
    table[0, :own] = 0  # nothing above: what is there is for the group itself
    for row in range(1, len(above.layouts) - stored):
        table[row, [x for x in range(1, end) if below.layouts[x] == above.layouts[row]]] = 0
    if stored:
        table[0, -1] = 0
        table[-1, [0, -1]] = 0
    return table
