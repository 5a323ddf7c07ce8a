"""Tensors that lie in one storage: what a view and the tensor that it views keep together is there once.

A view has no bytes of its own while it is read: it prolongs the life of what it views. What is *held* of it, from forward to backward
readers, is the whole storage it lies in, and other tensors of that storage may be held too: attention's output and the same
output with its heads merged; queries, keys and values, split off one product. So the held tensors of one storage are a family:

    c_attn ──split──► q ──► held until its attention's backward      a family of three: the storage of c_attn is there until
              ├─────► k ──► held                                     the last of them that is held as produced is not needed
              └─────► v ──► held as the copy that attention gathered

What is expanded has the bytes of what it repeats.

A member is held *in the storage* if it is held as produced, nothing on the way from the owner to it was copied or sliced (then its bytes
are its part of the owner's), and *alone* otherwise. A chain of nodes, one per member, the longest held first, owns the storage's
bytes: each is needed from the end of the next shorter one to its own, if its member or a longer one lies in the storage. What is
held in the storage of a source costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from solver_shard.choice.graph import FORBIDDEN, Ints
from solver_shard.choice.groups import Lives, Member, Storage
from solver_shard.choice.nodes import Kind, Node
from solver_shard.choice.tables import Layouts
from solver_shard.layout import Layout
from solver_shard.program import Program


class Builder(Protocol):
    """What this module needs of the lowering."""

    program: Program
    lives: Lives
    nodes: list[Node]
    index: dict[tuple[Kind, int, int], int]

    def _add(self, node: Node, costs: Ints, usages: Ints, interval: tuple[int, int]) -> int: ...
    def _edge(self, u: int, v: int, key: Any, build: Callable[[], Ints]) -> None: ...
    def _bytes(self, t: int, layouts: Layouts, *, shape: tuple[int, ...] | None = None) -> Ints: ...
    def _producer(self, t: int) -> int: ...


def add_storage(graph: Builder, storage: Storage) -> None:
    """The keep nodes of a storage's members and the chain that owns its bytes."""
    owner = graph._producer(storage.owner)
    layouts = graph.nodes[owner].layouts
    sizes = graph._bytes(storage.owner, layouts)
    classes = np.unique(sizes)
    before: int | None = None
    for k, member in enumerate(storage.members):
        keep = _keep(graph, storage, member, owner, sizes)
        if not storage.made:
            continue
        usages = np.concatenate([[0], classes, classes])
        low = max([storage.start, *(m.until for m in storage.members[k + 1 : k + 2])])
        node = Node(kind=Kind.STORAGE, item=member.tensor, layouts=(Layout(),) * len(usages))
        v = graph._add(node, np.zeros_like(usages), usages, (min(low, member.until), member.until))
        columns = graph.nodes[keep].layouts
        alone = len(columns) - graph.nodes[keep].aliases
        whole = _whole(graph, storage, member, columns[alone:])
        key = (alone, tuple(whole.tolist()), tuple(classes.tolist()), k > 0)
        graph._edge(keep, v, ("storage", key), lambda a=alone, w=whole, k=k: _need_table(a, w, classes, k > 0))  # type: ignore[misc]
        if before is not None:
            graph._edge(before, v, ("longer", len(classes)), lambda: _longer_table(len(classes)))
        before = v


def _keep(graph: Builder, storage: Storage, member: Member, owner: int, sizes: Ints) -> int:
    """What a member keeps: strategy 0 nothing, then alone, for each reason, and last in the storage."""
    t, hold = member.tensor, graph.index[Kind.HOLD, member.tensor, 0]
    held = tuple(x for x, origin in zip(graph.nodes[hold].layouts, graph.nodes[hold].origins, strict=True) if origin < 0)
    reasons, n = len(member.path) + 1, len(held)
    if not member.path:
        reasons = 0
    nbytes, zeros = graph._bytes(t, held, shape=graph.lives.expanded.get(t)), np.zeros(n, dtype=np.int64)
    usages = np.concatenate([[0], *[nbytes] * reasons, zeros])
    node = Node(kind=Kind.KEEP, item=t, layouts=(Layout(), *held * (reasons + 1)), aliases=n)
    start, until = graph.lives.base[t][1], graph.lives.until(t)
    v = graph._add(node, np.zeros_like(usages), usages, (min(start, until), until))
    key = (graph.nodes[hold].layouts, graph.nodes[hold].origins, reasons)
    graph._edge(hold, v, ("keep alone", key), lambda: _held_table(graph.nodes[hold].origins, n, reasons))
    for k, (x, group) in enumerate(member.path):
        w = graph.index[Kind.RESHARD, x, group]
        aliases, size = graph.nodes[w].aliases, len(graph.nodes[w].layouts)
        graph._edge(w, v, ("copied", aliases, size, k, reasons, n), lambda a=aliases, s=size, k=k: _copied_table(a, s, k, reasons, n))  # type: ignore[misc]
    if member.path:
        whole = _whole(graph, storage, member, held)
        key = (tuple(sizes.tolist()), tuple(whole.tolist()), reasons)
        graph._edge(owner, v, ("sliced", key), lambda: _sliced_table(sizes, whole, reasons))
    return v


def _whole(graph: Builder, storage: Storage, member: Member, held: Layouts) -> Ints:
    """Bytes of the storage in which a member of this layout is its part, or -1 where that is no whole number."""
    part, whole = graph.program.tensors[member.tensor].numel, graph.program.tensors[storage.owner].numel
    common = math.gcd(part, whole)
    scaled = graph._bytes(member.tensor, held) * (whole // max(common, 1))  # bytes times elements would not fit 64 bits
    return np.where(scaled % (part // common) == 0, scaled // (part // common), -1) if part else np.zeros_like(scaled)


def _held_table(origins: tuple[int, ...], n: int, reasons: int) -> Ints:
    """What is held, against what is kept: nothing of a copy, the layout that is held otherwise."""
    table = np.full((len(origins), 1 + n * (reasons + 1)), FORBIDDEN, dtype=np.int64)
    position = 0
    for row, origin in enumerate(origins):
        if origin >= 0:
            table[row, 0] = 0
        else:
            table[row, 1 + position :: n] = 0
            position += 1
    return table


def _copied_table(aliases: int, size: int, k: int, reasons: int, n: int) -> Ints:
    """Read ``k`` on the way, against reasons: an earlier one was a copy, this one, a later one, or (the last two) none was."""
    table = np.zeros((size, 1 + n * (reasons + 1)), dtype=np.int64)
    for reason in range(k, reasons + 1):
        columns = slice(1 + n * reason, 1 + n * (reason + 1))
        table[: aliases if reason == k else 0, columns] = FORBIDDEN
        table[aliases if reason > k else size :, columns] = FORBIDDEN
    return table


def _sliced_table(sizes: Ints, whole: Ints, reasons: int) -> Ints:
    """The owner's bytes, against reasons: in the storage is what has its part of them, the last reason is that it has not."""
    n = len(whole)
    table = np.zeros((len(sizes), 1 + n * (reasons + 1)), dtype=np.int64)
    part = sizes[:, None] == whole
    table[:, 1 + n * (reasons - 1) : 1 + n * reasons] = np.where(part, FORBIDDEN, 0)
    table[:, 1 + n * reasons :] = np.where(part, 0, FORBIDDEN)
    return table


def _need_table(alone: int, whole: Ints, classes: Ints, shorter: bool) -> Ints:
    """A member against its link of the chain: needed for it, with these bytes; else nothing, or needed for a longer one."""
    c = len(classes)
    table = np.full((alone + len(whole), 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[:alone, 0] = 0
    table[:alone, 1 + c :] = 0 if shorter else FORBIDDEN
    table[alone:, 1 : 1 + c] = np.where(whole[:, None] == classes, 0, FORBIDDEN)
    return table


def _longer_table(c: int) -> Ints:
    """A link against the next shorter one: what is needed longer is there before, and what is not must be needed for itself."""
    table = np.full((1 + 2 * c, 1 + 2 * c), FORBIDDEN, dtype=np.int64)
    table[0, : 1 + c] = 0
    for size in range(c):
        for row in (1 + size, 1 + c + size):
            table[row, [1 + size, 1 + c + size]] = 0
    return table
