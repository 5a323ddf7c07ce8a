"""Which mesh axis to split into sub-axes: the one that has more devices than an op has heads or experts to give.

Llama 3 70B has 8 key-value heads. On ``dp=16,tp=16`` attention cannot be cut by ``tp``, only by a part of it; so the axis
becomes ``tp.0=8``, which cuts the key-value heads, and ``tp.1=2``, which may cut each head's group of queries, or
something else. The part that cuts heads is the outer one: then the devices that share a key-value head are neighbours,
and a query projection cut by the whole axis leaves every device with heads that its key-value head serves.

>>> split_where_needed(program, rulebook, Mesh.parse("dp=16,tp=16"))
Mesh 'dp=16,tp=8x2'

At most one axis is split, the innermost one, which the costliest traffic wants: every axis more multiplies the
strategies, so a mesh of three is only split where the user asks for it, or for a template, which leaves few. A mesh of
one axis is split only if nothing else of the op (its batch) can be cut by all devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Role
from solver_shard.rules.rule import Rule
from solver_shard.rules.rulebook import Rulebook

MAX_LIVE_AXES, MAX_TEMPLATE_AXES = 3, 4
"""Axes of more than one device after an automatic split: four take minutes and many gigabytes for the largest models, except where a
template leaves few strategies."""

COUNTS = ("heads", "experts")
"""Factors that are counts of a model's parts, not sizes."""


def split_where_needed(program: Program, rulebook: Rulebook, mesh: Mesh, axes: Collection[int] | None = None) -> Mesh:
    """The mesh with the innermost axis split where counts of heads or experts ask for it; the same mesh where they do not.

    Args:
        axes: positions of the axes that may be split, each for itself; None for the innermost of those with several devices.
    """
    live = [a for a, axis in enumerate(mesh.axes) if axis.size > 1]
    wanted = live[-1:] if axes is None else [a for a in live if a in axes]
    most = MAX_LIVE_AXES if axes is None else MAX_TEMPLATE_AXES
    sizes: dict[str, tuple[int, ...]] = {}
    for a in wanted:
        axis = mesh.axes[a]
        if axis.parent is None and len(live) + len(sizes) < most:
            part = _part(program, rulebook, axis.size, alone=axes is None and len(live) == 1)
            if part is not None:
                sizes[axis.name] = (part, axis.size // part)
    return mesh.split(sizes) if sizes else mesh


def _part(program: Program, rulebook: Rulebook, size: int, *, alone: bool) -> int | None:
    """By how many devices of an axis the most work can be cut, where not by all of them: a divisor of the size."""
    flops: dict[int, int] = {}
    shared = shared_heads(program)
    factors: dict[int, tuple[list[int], list[int]]] = {}  # by rule, which many ops share
    for i in (i for i, op in enumerate(program.ops) if op.phase is Phase.FORWARD):
        rule = rulebook.rule(program, i)
        if id(rule) not in factors:
            factors[id(rule)] = _counts(rule), _plain(rule)
        counts, plain = factors[id(rule)]
        for f in counts:
            if alone and any(rule.factors[other].legal(size) for other in plain if other not in counts):
                continue
            count = rule.factors[f]
            part = next(n for n in range(size, 0, -1) if size % n == 0 and count.legal(n) and shared.get(i, n) % n == 0)
            flops[part] = flops.get(part, 0) + rule.flops
    best = max(flops, key=lambda part: (flops[part], part), default=1)
    return best if 1 < best < size else None


def _counts(rule: Rule) -> list[int]:
    """Factors that are counts of heads or experts, of ops that run on the matrix units."""
    return [f for f in _plain(rule) if rule.matmul and rule.factors[f].name in COUNTS]


def _plain(rule: Rule) -> list[int]:
    """Factors that an axis can cut without more ado."""
    return [s.factor for s in rule.strategies() if s.factor is not None and s.implementation is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What the cut dim of a matrix or bias holds: ``shared`` key-value heads, each with ``group`` heads of its own.

    Into how many parts tensor parallelism may cut the matrices around attention: between heads, and never inside one.

    Queries may be cut into groups that share a key-value head only where every device has a single one of these, as the rule of
    attention says (``solver_shard.rules.families.attention``).

    >>> queries, keys = Heads(shared=8, group=8), Heads(shared=8)
    >>> queries.cut_by((8, 2)), keys.cut_by((8, 2)), queries.cut_by((2, 8))
    ((True, True), (True, False), (False, True))
    """

    shared: int
    group: int = 1

    def cut_by(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Which parts of a split axis, of these sizes, cut: the set that cuts the key-value heads most, then groups to its right."""
        sets = [s for n in range(len(sizes) + 1) for s in itertools.combinations(range(len(sizes)), n)]
        legal = [(math.prod(sizes[a] for a in s), s) for s in sets if self.shared % math.prod(sizes[a] for a in s) == 0]
        shards, chosen = max(legal, key=lambda found: found[0])
        cut, group = set(chosen), self.group if shards == self.shared else 1
        for a in range(max(chosen, default=len(sizes)) + 1, len(sizes)):
            if group % sizes[a] == 0:
                group //= sizes[a]
                cut.add(a)
        return tuple(a in cut for a in range(len(sizes)))


def heads_of(program: Program, cut: Collection[int]) -> dict[int, Heads]:
    """Heads of the parameters in ``cut`` that feed an attention or read its result; others are not there."""
    makers, readers = _makers(program), program.readers()
    found: dict[int, Heads] = {}
    for i, counts in _attentions(program, makers, cut):
        if not counts:
            continue
        shared, most = min(counts.values()), max(counts.values())
        after = _after(program, readers, program.ops[i].results[0], cut)
        for p, count in (counts | dict.fromkeys(after, most)).items():
            found[p] = Heads(shared=shared, group=count // shared)
    return found


def shared_heads(program: Program) -> dict[int, int]:
    """Key-value heads of every attention of the forward pass by op position, where projections make them.

    That can be fewer than attention itself sees: many models repeat keys and values before it.
    """
    parameters = {t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
    return {i: min(counts.values()) for i, counts in _attentions(program, _makers(program), parameters) if counts}


def _makers(program: Program) -> dict[int, Op]:
    return {t: op for op in program.ops for t in op.results}


def _attentions(program: Program, makers: dict[int, Op], cut: Collection[int]) -> Iterator[tuple[int, dict[int, int]]]:
    """Every attention of the forward pass, with the parameters that make its query, key and value and their counts of heads."""
    for i, op in enumerate(program.ops):
        if op.phase is Phase.FORWARD and "attention" in op.name:
            counts: dict[int, int] = {}
            for t in op.operands[:3]:
                _before(program, makers, t, cut, counts)
            yield i, counts


def _before(program: Program, makers: dict[int, Op], start: int, cut: Collection[int], counts: dict[int, int]) -> None:
    """Walk back to the projection that made an operand of attention; a view on the way says how many heads it has."""
    pending, seen = [(start, 0)], {start}
    while pending:
        t, count = pending.pop()
        op = makers.get(t)
        if op is None:
            continue
        if op.name == "aten.view.default":
            source, result = program.tensors[op.operands[0]].shape, program.tensors[t].shape
            if len(result) > len(source) and source[-1:] == (result[-2] * result[-1],):
                count = result[-2]
        parameters = [p for p in op.operands if p in cut]
        if count:
            counts.update(dict.fromkeys(parameters, count))
        if op.name == "aten.einsum.default" and any(program.tensors[p].role is Role.PARAMETER for p in op.operands):
            continue
        for x in op.operands:
            if x not in seen:
                seen.add(x)
                pending.append((x, count))


def _after(program: Program, readers: Mapping[int, list[tuple[int, int]]], start: int, cut: Collection[int]) -> list[int]:
    """The matrix that reads what attention made, through views and permutations."""
    pending, found = [start], []
    while pending:
        for i, _ in readers.get(pending.pop(), ()):
            op = program.ops[i]
            if op.phase is not Phase.FORWARD:
                continue
            if op.name in ("aten.view.default", "aten.permute.default", "aten._to_copy.default", "aten.slice.Tensor"):
                pending.append(op.results[0])
            elif op.name == "aten.einsum.default":
                found += [p for p in op.operands if p in cut]
    return found
