"""Cleaning of patch embeddings: a convolution whose windows tile the image is a matrix product over each patch.

With stride equal to the kernel and nothing padded, pixels [n, c, h*p, w*q] are a view [n, c, h, p, w, q], and the
convolution with weight [o, c, p, q] contracts c, p and q. Other convolutions stay as they are.
"""

from __future__ import annotations

from solver_shard.frontends import dims as D
from solver_shard.frontends.clean_matmul import product
from solver_shard.frontends.context import Context, Result
from solver_shard.frontends.draft import Value
from solver_shard.frontends.raw import RawNode, Use
from solver_shard.program import Ref


def convolution(ctx: Context, node: RawNode) -> Result:
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
    made = Value(made.base, (made.dims[0], made.dims[last], *made.dims[1:last]))
    if not isinstance(a["bias"], Use):
        return made
    bias = ctx.value(a["bias"])
    return ctx.binary(node, "aten.add.Tensor", made, Value(bias.base, (*bias.dims, *((),) * len(spatial)), bias.raws), {"alpha": 1})


def convolution_backward(ctx: Context, node: RawNode) -> Result:
    a, draft = node.arguments, ctx.draft
    weight, grad = ctx.value(a["weight"]), ctx.value(a["grad_output"])
    patches = _patches(ctx, node, weight)
    if patches is None:
        return ctx.generic(node)
    spatial = range(len(weight.dims) - 2)
    found: list[Value | None] = [None, None, None]
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
        found[0] = Value(made.base, merged)
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


def _patches(ctx: Context, node: RawNode, weight: Value) -> Value | None:
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
    return None if dims is None else Value(value.base, dims, value.raws)


CONVOLUTIONS = {"convolution": convolution, "convolution_backward": convolution_backward}
