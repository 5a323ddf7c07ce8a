"""Into how many parts tensor parallelism may cut the matrices around attention: between heads, and never inside one.

Queries may be cut into groups that share a key-value head only where every device has a single one of these, as the rule of
attention says (``solver_shard.rulebook.families_attention``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from solver_shard.program import Op, Phase, Program, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What the cut dim of a matrix or bias holds: ``shared`` key-value heads, each with ``group`` heads of its own.

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
        if op.phase is Phase.FORWARD and "scaled_dot_product" in op.name:
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
