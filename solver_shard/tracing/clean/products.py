"""Cleaning of matrix products, and of convolutions that are some, into einsum: transposes and flattened dims become letters.

``view(x, [b*s, k]) @ t(w)`` viewed back to ``[b, s, n]`` is ``abc,dc->abd`` on x and w as they are.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from solver_shard.program import Ref
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.clean.draft import Context, DraftValue, ProgramDraft, Result
from solver_shard.tracing.joint_graph import RawNode, Use

Pair = tuple[int, int]


def mm(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "self", "mat2")
    return product(ctx, node, a, b, contracted=[(1, 0)], left=[0], right=[1])


def bmm(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "self", "mat2")
    return product(ctx, node, a, b, batch=[(0, 0)], contracted=[(2, 1)], left=[1], right=[2])


def mv(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "self", "vec")
    return product(ctx, node, a, b, contracted=[(1, 0)], left=[0])


def dot(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "self", "tensor")
    return product(ctx, node, a, b, contracted=[(0, 0)])


def addmm(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "mat1", "mat2")
    return _add(ctx, node, product(ctx, node, a, b, contracted=[(1, 0)], left=[0], right=[1]))


def baddbmm(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "batch1", "batch2")
    return _add(ctx, node, product(ctx, node, a, b, batch=[(0, 0)], contracted=[(2, 1)], left=[1], right=[2]))


def linear(ctx: Context, node: RawNode) -> Result:
    a, b = _two(ctx, node, "input", "weight")
    last = len(a.dims) - 1
    made = product(ctx, node, a, b, contracted=[(last, len(b.dims) - 1)], left=list(range(last)), right=list(range(len(b.dims) - 1)))
    if not isinstance(node.arguments.get("bias"), Use):
        return made
    return ctx.binary(node, "aten.add.Tensor", made, ctx.value(node.arguments["bias"]), {"alpha": 1})


def product(
    ctx: Context,
    node: RawNode,
    a: DraftValue,
    b: DraftValue,
    *,
    batch: Sequence[Pair] = (),
    contracted: Sequence[Pair] = (),
    left: Sequence[int] = (),
    right: Sequence[int] = (),
    dtype: str | None = None,
) -> DraftValue:
    """One einsum over the bases of both values; result dims are batch, left, right, merged as the raw result is.

    Dims that both operands merged in the same way stay apart; other shared dims are made whole first, and so are free
    dims that are features of a weight gradient, or of which the operand already has a whole form.
    """
    draft = ctx.draft
    a, b, together = _part(a, b, batch)
    a, b, summed = _part(a, b, contracted)
    pairs = [pair for parts in (*together, *summed) for pair in parts]
    a, b, _ = _pair_up(draft, a, b, pairs)
    a = _settle_free(draft, a, left, [pair[0] for parts in summed for pair in parts])
    b = _settle_free(draft, b, right, [pair[1] for parts in summed for pair in parts])
    a, b = (v if _is_split(draft, v) else draft.settle(v) for v in (a, b))
    a, b, matched = _pair_up(draft, a, b, pairs)
    pieces = dict(zip(pairs, matched, strict=True))
    letters = iter(string.ascii_letters)
    names: tuple[dict[int, str], dict[int, str]] = ({}, {})
    same: dict[Pair, Pair] = {}
    for one, two in (piece for found in matched for piece in found):
        if one is not None and two is not None:
            same[0, one[0]] = (1, two[0])
    for side, value in enumerate((a, b)):
        for dim in range(len(draft.base_shape(value))):
            if dim not in names[side]:
                names[side][dim] = next(letters)
                if side == 0 and (0, dim) in same:
                    names[1][same[0, dim][1]] = names[0][dim]
    out: list[str] = []
    sizes: list[int] = []
    dims: list[D.Group] = []

    def give(letter: str, n: int) -> D.Atom:
        out.append(letter)
        sizes.append(n)
        return (len(out) - 1, 1, n)

    for parts in together:
        group: list[D.Atom] = []
        for one, two in (piece for pair in parts for piece in pieces[pair]):
            side, atom = (0, one) if one is not None else (1, two)
            assert atom is not None
            group.append(give(names[side][atom[0]], atom[2]))
        dims.append(tuple(group))
    for side, value, free in ((0, a, left), (1, b, right)):
        for d in free:
            dims.append(tuple(atom if atom[0] == D.BROADCAST else give(names[side][atom[0]], atom[2]) for atom in value.dims[d]))
    equation = f"{''.join(names[0][i] for i in range(len(names[0])))},{''.join(names[1][i] for i in range(len(names[1])))}->{''.join(out)}"
    operands = (a.base, b.base) if a.base != b.base else (a.base,)
    attributes = {"equation": equation, "tensors": (Ref(0), Ref(len(operands) - 1))}
    made = draft.emit("aten.einsum.default", operands, attributes, [(tuple(sizes), dtype or ctx.result(node)[1])], raws=(*a.raws, *b.raws))
    return DraftValue(made[0], tuple(dims))


Pieces = list[tuple[D.Atom | None, D.Atom | None]]


def _part(a: DraftValue, b: DraftValue, pairs: Sequence[Pair]) -> tuple[DraftValue, DraftValue, list[list[Pair]]]:
    """Where shared dims were merged differently, part them as finely as both allow; parts are new dims after the others."""
    result: list[list[Pair]] = []
    for da, db in pairs:
        parts = [(da, db)]
        if _match(a.dims[da], b.dims[db]) is None:
            sizes = D.common([D.solid(a.dims[da]), D.solid(b.dims[db])])
            ours, theirs = D.match(a.dims[da], sizes), D.match(b.dims[db], sizes)
            if len(sizes) > 1 and ours is not None and theirs is not None:
                parts += [(len(a.dims) + i, len(b.dims) + i) for i in range(len(sizes) - 1)]
                a = DraftValue(a.base, (*a.dims[:da], ours[0], *a.dims[da + 1 :], *ours[1:]), a.raws)
                b = DraftValue(b.base, (*b.dims[:db], theirs[0], *b.dims[db + 1 :], *theirs[1:]), b.raws)
        result.append(parts)
    return a, b, result


def _pair_up(draft: ProgramDraft, a: DraftValue, b: DraftValue, pairs: Sequence[Pair]) -> tuple[DraftValue, DraftValue, list[Pieces]]:
    """Match the atoms of shared dims one to one (None: expanded there), making dims whole where they were merged differently."""
    result: list[Pieces] = []
    for da, db in pairs:
        found = _match(a.dims[da], b.dims[db])
        if found is None:
            if len(D.solid(a.dims[da])) > 1:
                a = draft.settle(a, [da])
            if len(D.solid(b.dims[db])) > 1:
                b = draft.settle(b, [db])
            return _pair_up(draft, a, b, pairs)
        if any(one is None and two is None for one, two in found):
            a = draft.settle(a, [da])
            return _pair_up(draft, a, b, pairs)
        result.append(found)
    return a, b, result


def _match(one: D.Group, two: D.Group) -> Pieces | None:
    """Pairs of equal atoms; expanded atoms are cut as needed. Where a unit is all there is, it stays."""
    first, second = list(reversed(D.solid(one))), list(reversed(D.solid(two)))
    if not first and not second:
        unit = next((atom for atom in one if atom[0] != D.BROADCAST), None)
        return [(unit, None)] if unit else []
    pairs: Pieces = []
    while first and second:
        x, y = first.pop(), second.pop()
        if x[2] > y[2] and x[0] == D.BROADCAST and x[2] % y[2] == 0:
            first.append((x[0], x[1], x[2] // y[2]))
        elif y[2] > x[2] and y[0] == D.BROADCAST and y[2] % x[2] == 0:
            second.append((y[0], y[1], y[2] // x[2]))
        elif x[2] != y[2]:
            return None
        pairs.append((None if x[0] == D.BROADCAST else x, None if y[0] == D.BROADCAST else y))
    return pairs if not first and not second else None


def _settle_free(draft: ProgramDraft, value: DraftValue, free: Sequence[int], contracted: Sequence[int]) -> DraftValue:
    """Rows of an activation stay apart; the features of a weight gradient are one dim, as in the weight.

    A weight gradient contracts several dims (batch, sequence), and they lie before the features.
    """
    summed = [atom for d in contracted for atom in D.real(value.dims[d])]
    merge = []
    for d in free:
        atoms = D.real(value.dims[d])
        if len(atoms) > 1:
            features = len(summed) > 1 and min(map(D.place, summed)) < min(map(D.place, atoms))
            if features or draft.merged(value, d):
                merge.append(d)
    return draft.settle(value, merge) if merge else value


def _is_split(draft: ProgramDraft, value: DraftValue) -> bool:
    """Whether every atom is a full dim of the base."""
    base = draft.base_shape(value)
    return all(atom[0] == D.BROADCAST or atom[2] == base[atom[0]] for group in value.dims for atom in group)


def _two(ctx: Context, node: RawNode, one: str, two: str) -> tuple[DraftValue, DraftValue]:
    return ctx.value(node.arguments[one]), ctx.value(node.arguments[two])


def _add(ctx: Context, node: RawNode, made: DraftValue) -> Result:
    """beta * self + alpha * product, as einsum and add."""
    a = node.arguments
    if a.get("alpha", 1) != 1:
        shape, dtype = ctx.draft.base_shape(made), ctx.draft.dtype(made)
        scaled = ctx.draft.emit("aten.mul.Scalar", (made.base,), {"self": Ref(0), "other": a["alpha"]}, [(shape, dtype)])
        made = DraftValue(scaled[0], made.dims)
    if a.get("beta", 1) == 0:
        return made
    return ctx.binary(node, "aten.add.Tensor", made, ctx.value(a["self"]), {"alpha": a.get("beta", 1)})


MATMULS = {"mm": mm, "bmm": bmm, "mv": mv, "dot": dot, "addmm": addmm, "baddbmm": baddbmm, "linear": linear}


def convolution(ctx: Context, node: RawNode) -> Result:
    """Cleaning of patch embeddings: a convolution whose windows tile the image is a matrix product over each patch.

    With stride equal to the kernel and nothing padded, pixels [n, c, h*p, w*q] are a view [n, c, h, p, w, q], and the
    convolution with weight [o, c, p, q] contracts c, p and q. Other convolutions stay as they are.
    """
    a = node.arguments
    weight = ctx.value(a["weight"])
    patches = _patches(ctx, node, weight)
    if patches is None:
        return ctx.generic(node)
    spatial = range(len(weight.dims) - 2)
    made = product(
        ctx,
        node,
        patches,
        weight,
        contracted=[(1, 1), *((3 + 2 * i, 2 + i) for i in spatial)],
        left=[0, *(2 + 2 * i for i in spatial)],
        right=[0],
    )
    last = len(made.dims) - 1
    made = DraftValue(made.base, (made.dims[0], made.dims[last], *made.dims[1:last]))
    if not isinstance(a["bias"], Use):
        return made
    bias = ctx.value(a["bias"])
    return ctx.binary(node, "aten.add.Tensor", made, DraftValue(bias.base, (*bias.dims, *((),) * len(spatial)), bias.raws), {"alpha": 1})


def convolution_backward(ctx: Context, node: RawNode) -> Result:
    a, draft = node.arguments, ctx.draft
    weight, grad = ctx.value(a["weight"]), ctx.value(a["grad_output"])
    patches = _patches(ctx, node, weight)
    if patches is None:
        return ctx.generic(node)
    spatial = range(len(weight.dims) - 2)
    found: list[DraftValue | None] = [None, None, None]
    if node.results[0] is not None:
        dims = [0, *(2 + i for i in spatial)]
        made = product(
            ctx, node, grad, weight, contracted=[(1, 0)], left=dims, right=[1, *(2 + i for i in spatial)], dtype=node.results[0][1]
        )
        order = [0, len(dims)]
        for i in spatial:
            order += [1 + i, len(dims) + 1 + i]
        merged = D.reshape(D.permute(made.dims, order), node.results[0][0])
        assert merged is not None
        found[0] = DraftValue(made.base, merged)
    if node.results[1] is not None:
        pairs = [(0, 0), *((2 + i, 2 + 2 * i) for i in spatial)]
        right = [1, *(3 + 2 * i for i in spatial)]
        found[1] = product(ctx, node, grad, patches, contracted=pairs, left=[1], right=right, dtype=node.results[1][1])
    if node.results[2] is not None:
        whole = draft.plain(grad)
        dims_summed = (0, *(2 + i for i in spatial))
        attributes = {"self": Ref(0), "dim": dims_summed, "keepdim": False, "dtype": None}
        found[2] = draft.whole(draft.emit("aten.sum.dim_IntList", (whole,), attributes, [node.results[2]])[0])
    return tuple(found)


def _patches(ctx: Context, node: RawNode, weight: DraftValue) -> DraftValue | None:
    """The input with every image dim split into (patch, inside); None unless patches tile it."""
    a = node.arguments
    value = ctx.value(a["input"])
    kernel, image = weight.shape[2:], value.shape[2:]
    plain = not a["transposed"] and a["groups"] == 1 and set(a["padding"]) <= {0} and set(a["dilation"]) <= {1}
    stride = tuple(a["stride"]) * (len(kernel) if len(a["stride"]) == 1 else 1)
    if not plain or stride != kernel or len(image) != len(kernel) or any(n % k for n, k in zip(image, kernel, strict=True)):
        return None
    split = [size for n, k in zip(image, kernel, strict=True) for size in (n // k, k)]
    dims = D.reshape(value.dims, (*value.shape[:2], *split))
    return None if dims is None else DraftValue(value.base, dims, value.raws)


CONVOLUTIONS = {"convolution": convolution, "convolution_backward": convolution_backward}
