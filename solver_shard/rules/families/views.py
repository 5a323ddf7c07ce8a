"""Families of ops that only rename, split, merge or repeat dims; every reduction passes through them.

A reshape is a chain of factors: ``[8, 12] -> [8, 3, 4]`` holds ``a=8`` in dim 0 of both, ``b=3`` major and ``c=4`` minor
in dim 1 of the operand. Only the major factor of a dim can be cut, and only into equal shards where the other side has
another dim size, so that every shard of one side is a shard of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from solver_shard.errors import RuleError
from solver_shard.layout import REDUCTIONS
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.row import Family


def view(call: OpCall) -> RuleDraft:
    """A reshape: the factors that both sizes share, group by group of equal size products."""
    draft = RuleDraft(call)
    source, target = call.shape("self"), call.results[0].shape
    if math.prod(source) != math.prod(target):
        raise RuleError(f"{call.name}: a tensor of shape {source} cannot be viewed as {target}; the element counts differ")
    if 0 in source:
        return _finish(draft)
    left: list[list[int]] = [[] for _ in source]
    right: list[list[int]] = [[] for _ in target]
    for dims, others in groups(source, target):
        if len(dims) == len(others) == 1:
            held = draft.factor(draft.letter(), source[dims[0]])
            left[dims[0]].extend(held)
            right[others[0]].extend(held)
        else:
            _chain(draft, source, target, dims, others, left, right)
    draft.put("self", [tuple(h) for h in left])
    draft.result(0, [tuple(h) for h in right])
    return _finish(draft)


def groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest split of both shapes into runs with equal products; dims of size 1 are left out.

    >>> groups((4, 6, 1, 5), (2, 2, 6, 5))
    [([0], [0, 1]), ([1], [2]), ([3], [3])]
    """
    left = [d for d, size in enumerate(source) if size != 1]
    right = [d for d, size in enumerate(target) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left):
        dims, others = [left[i]], [right[j]]
        a, b = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, dims, i = a * source[left[i]], [*dims, left[i]], i + 1
            else:
                b, others, j = b * target[right[j]], [*others, right[j]], j + 1
        found.append((dims, others))
    return found


def _chain(
    draft: RuleDraft,
    source: Sequence[int],
    target: Sequence[int],
    dims: list[int],
    others: list[int],
    left: list[list[int]],
    right: list[list[int]],
) -> None:
    """Common factors of one group, major to minor; where sizes share no more, the rest of both dims is one lump."""
    i = j = 0
    a, b = source[dims[0]], target[others[0]]
    while True:
        size = math.gcd(a, b)
        if size == 1:
            return _lumps(
                draft,
                [(left[dims[i]], a), *((left[d], source[d]) for d in dims[i + 1 :])],
                [(right[others[j]], b), *((right[d], target[d]) for d in others[j + 1 :])],
            )
        held = draft.factor(draft.letter(), size, even=True)
        left[dims[i]].extend(held)
        right[others[j]].extend(held)
        a, b = a // size, b // size
        if a == 1:
            i += 1
            a = source[dims[i]] if i < len(dims) else 1
        if b == 1:
            j += 1
            b = target[others[j]] if j < len(others) else 1
        if i == len(dims) or j == len(others):
            return None


def _lumps(draft: RuleDraft, left: list[tuple[list[int], int]], right: list[tuple[list[int], int]]) -> None:
    """Sizes that do not fit together: each keeps a factor of its own that is not cut."""
    for held, size in (*left, *right):
        held.extend(draft.factor(draft.letter(), size, cut=False))


def permute(call: OpCall) -> RuleDraft:
    """Dims in another order; ``dims`` gives the operand dim of each result dim."""
    draft = RuleDraft(call)
    shape = call.shape("self")
    letters = draft.letters(shape)
    draft.put("self", letters)
    order = call.attributes.get("dims")
    if "numpy_T" in call.name:
        chosen = list(reversed(range(len(shape))))
    elif order is not None:
        chosen = [call.dim(d, len(shape)) for d in order]
    else:
        chosen = list(range(len(shape)))
        pair = (call.attributes.get("dim0", 0), call.attributes.get("dim1", 1)) if len(shape) > 1 else (0, 0)
        if shape:
            a, b = (call.dim(d, len(shape)) for d in pair)
            chosen[a], chosen[b] = chosen[b], chosen[a]
    if sorted(chosen) != list(range(len(shape))):
        raise RuleError(f"{call.name}: dims {order} are not an order of the {len(shape)} dims of {shape}")
    draft.result(0, [letters[d] for d in chosen])
    return _finish(draft)


def expand(call: OpCall) -> RuleDraft:
    """Dims of size 1 and new leading dims grow: the result can be cut there while the operand stays whole."""
    draft = RuleDraft(call)
    source, target = call.shape("self"), call.results[0].shape
    skip = len(target) - len(source)
    if skip < 0 or any(size not in (1, target[skip + d]) for d, size in enumerate(source)):
        raise RuleError(f"{call.name}: a tensor of shape {source} cannot be expanded to {target}")
    letters = draft.letters(target)
    draft.put("self", [letters[skip + d] if size == target[skip + d] else () for d, size in enumerate(source)])
    draft.result(0, letters)
    return _finish(draft)


def repeat(call: OpCall) -> RuleDraft:
    """Dims repeated once pass; the others stay whole, new leading ones can be cut; the data is copied."""
    draft = RuleDraft(call)
    source, target = call.shape("self"), call.results[0].shape
    skip = len(target) - len(source)
    if skip < 0:
        raise RuleError(f"{call.name}: a tensor of shape {source} cannot be repeated to {target}")
    held: list[DimFactors] = [draft.factor(draft.letter(), size) for size in target[:skip]]
    inputs: list[DimFactors] = []
    for d, size in enumerate(source):
        copies = target[skip + d]
        if size in (1, copies):
            held.append(draft.factor(draft.letter(), copies))
            inputs.append(held[-1] if size == copies else ())
        else:
            held.append(draft.factor(draft.letter(), copies, cut=False))
            inputs.append(draft.factor(draft.letter(), size, cut=False))
    draft.put("self", inputs)
    draft.result(0, held)
    _finish(draft).view = False
    return draft


def _finish(draft: RuleDraft) -> RuleDraft:
    draft.view = True
    draft.linear(("self",), REDUCTIONS)
    return draft


FAMILIES = (
    Family(name="view", build=view),
    Family(name="permute", build=permute),
    Family(name="expand", build=expand),
    Family(name="repeat", build=repeat),
)
