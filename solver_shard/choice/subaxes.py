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

from collections.abc import Collection

from solver_shard.choice.heads import shared_heads
from solver_shard.mesh import Mesh
from solver_shard.program import Phase, Program
from solver_shard.rulebook.build import Rulebook
from solver_shard.rulebook.rule import Rule

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
    for i in (i for i, op in enumerate(program.ops) if op.phase is Phase.FORWARD):
        rule = rulebook.rule(program, i)
        counts, plain = _counts(rule), _plain(rule)
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
