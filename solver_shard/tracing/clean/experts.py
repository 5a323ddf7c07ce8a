"""Cleaning of the experts of a mixture: tokens are sorted by expert inside each sequence instead of over the whole batch.

Libraries flatten (batch, sequence, choice), sort by expert, pick the tokens in that order, run grouped matrix products, and
put the results back. The sort mixes all sequences, so that no dim of what follows is the batch. But no token sees another,
and any order in which the rows of an expert are next to each other will do: here every sequence is sorted by itself,

    experts  [b, n]        n = sequence * choices;  aten.sort along n gives the order, sorting that gives its inverse
    rows     [b, n, h]     shard.take(x, order):  y[b, i] = x[b, order[b, i]]
    ends     [b, e]        shard.count per sequence and expert, then cumsum
    products [b, n, f]     shard.grouped_mm(rows, weights, ends), and shard.grouped_mm_weights for their gradient

and the results are put back with the inverse. ``n`` is the same for all sequences, and the batch is a dim like any other. (A
real run sorts the rows that a device has in one go and calls one grouped kernel: the same products on the same rows.)

Every value that depends on the order is marked; an op that would see it (one that is not row-wise) makes the whole graph
``UnfitError``, and it is cleaned without this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from solver_shard.program import Ref
from solver_shard.tracing.clean import dims as D
from solver_shard.tracing.clean.draft import Context, DraftValue, Result, uses_of
from solver_shard.tracing.clean.rows import ROWS, VIEWS, reduction
from solver_shard.tracing.joint_graph import RawNode, Use

Handler = Callable[[Context, RawNode], Result]


class UnfitError(Exception):
    """The order of the tokens matters to some op."""


@dataclass(slots=True, eq=False, kw_only=True)
class _ExpertBlock:
    """The experts of one layer: ``[batch, rows]`` tensors of the order and of its inverse."""

    batch: int
    rows: int
    order: int
    inverse: int | None = None

    @property
    def size(self) -> int:
        return self.batch * self.rows

    @property
    def group(self) -> D.Group:
        """The flattened raw dim, as it lies in the first two dims of a tensor."""
        return ((0, 1, self.batch), (1, 1, self.rows))


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a value is to its block.

    order (position of a token's choice in the sequence, by sorted position), token (of which there are ``share`` times fewer),
    inverse, sorted (expert by sorted position), counts and ends (per expert), rows (dim 0 in sorted order), columns (dim 1).
    """

    what: str
    block: _ExpertBlock
    share: int = 1


_SHAPE_ONLY = {name for name, handler in VIEWS.items() if handler is VIEWS["full"] or handler is VIEWS["new_zeros"]}
_SAME = {name for name, handler in VIEWS.items() if handler is VIEWS["detach"]} | {"_to_copy"}
_RESHAPE = {name for name, handler in VIEWS.items() if handler is VIEWS["view"]} | {"expand"}
_TURN = {name for name, handler in VIEWS.items() if handler is VIEWS["permute"]}
_ALONG = {"split", "split_with_sizes", "cat", "flip", "slice", "slice_backward"}
_ALONG |= {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}
_REDUCE = {name for name, handler in ROWS.items() if handler is reduction}


@dataclass(slots=True, kw_only=True)
class Experts:
    """Cleaning of expert blocks in progress."""

    nodes: Sequence[RawNode]
    marks: dict[tuple[int, int], _Mark] = field(default_factory=dict)

    def clean(self, ctx: Context, position: int, handler: Handler) -> Result:
        """The result of a node, whose usual handler is given; UnfitError where an order that it does not know of matters."""
        node = self.nodes[position]
        family = node.op.split(".")[1]
        found = [self.marks[use.node, use.result] for use in uses_of(node) if (use.node, use.result) in self.marks]
        if not found:
            return (self._sort(ctx, node, position) if family == "sort" else None) or handler(ctx, node)
        if family in _SHAPE_ONLY:
            return handler(ctx, node)
        block = found[0].block
        if any(mark.block is not block for mark in found):
            self._unfit(node)
        special = _SPECIAL.get(family)
        if special is not None:
            result, mark = special(self, ctx, node, block)
        else:
            mark = self._passes(node, family, found, ctx)
            result = handler(ctx, node)
        if mark is not None:
            for index in range(len(node.results)):
                self.marks[position, index] = mark
        return result

    def check(self, returned: Sequence[Use]) -> None:
        """UnfitError where the graph returns something in sorted order."""
        for use in returned:
            if (use.node, use.result) in self.marks:
                self._unfit(self.nodes[use.node])

    def _sort(self, ctx: Context, node: RawNode, position: int) -> Result | None:
        """Experts sorted by sequence, where they are flattened; None for any other sort."""
        value, draft = ctx.first(node), ctx.draft
        readers = {reader.op.split(".")[1] for reader in ctx.readers.get(node.name, ())}
        if len(value.dims) != 1 or draft.dtype(value)[0] != "i" or not readers & {"index", "floor_divide"} or node.arguments["descending"]:
            return None
        atoms = D.solid(value.dims[0])
        if len(atoms) < 2 or any(atom[0] == D.BROADCAST for atom in atoms):
            return None
        first: D.Group = atoms[:1] if len(atoms) > 2 else ()
        batch, size = D.size(first), D.size(atoms)
        source = draft.form(value, (first, atoms[len(first) :]))
        shape = (batch, size // batch)
        results = [(shape, r[1]) for r in node.results if r is not None]
        made = draft.emit(node.op, (source,), dict(node.arguments) | {"self": Ref(0), "dim": 1}, results, raws=value.raws)
        block = _ExpertBlock(batch=batch, rows=size // batch, order=made[1])
        self.marks[position, 0] = _Mark("sorted", block)
        self.marks[position, 1] = _Mark("order", block)
        return DraftValue(made[0], (block.group,)), DraftValue(made[1], (block.group,))

    def _passes(self, node: RawNode, family: str, found: Sequence[_Mark], ctx: Context) -> _Mark:
        """The mark of what a row-wise op makes."""
        block, kinds = found[0].block, {mark.what for mark in found}
        shapes = [r[0] for r in node.results if r is not None]
        size, first = block.size, found[0]
        if family in _SAME and len(found) == 1 and first.what not in ("counts", "ends"):
            return first
        if family in _TURN and kinds <= {"rows", "columns"} and len(shapes[0]) == 2:
            turned = shapes[0] != (shape := ctx.first(node).shape) or (shape[0] == shape[1] and family in ("t", "numpy_T", "transpose"))
            return _Mark({"rows": "columns", "columns": "rows"}[first.what] if turned else first.what, block)
        fits = all(shape[:1] == (size,) for shape in shapes)
        if kinds == {"rows"} and fits:
            listed: Any = node.arguments.get("dim", node.arguments.get("dims"))
            over = {d % len(ctx.value(uses_of(node)[0]).dims) for d in ((listed,) if isinstance(listed, int) else listed or ())}
            if family in _RESHAPE:
                return first
            if family in _REDUCE and over and 0 not in over:
                return first
            rest = [use for use in uses_of(node) if (use.node, use.result) not in self.marks]
            apart = all(len(shape := ctx.value(use).shape) < len(shapes[0]) or shape[0] == 1 for use in rest)
            if (apart and node.pointwise) or (family in _ALONG and not rest and 0 not in over):
                return first
        self._unfit(node)

    def _token(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """The order by the number of choices of a token."""
        known, by = self._mark(node.arguments["self"]), node.arguments["other"]
        if known is None or known.what != "order" or not isinstance(by, int) or by < 1 or block.rows % by:
            self._unfit(node)
        results = [((block.batch, block.rows), ctx.result(node)[1])]
        made = ctx.draft.emit(node.op, (block.order,), {"self": Ref(0), "other": by}, results)
        return self._flat(ctx, block, made[0]), _Mark("token", block, by)

    def _index(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """Tokens picked in sorted order, or rows put back."""
        source, mark = node.arguments["self"], self._indexed(node)
        known = self._mark(source)
        if mark.what == "sorted" and known is None and len(ctx.value(source).dims) == 2:
            return self._bias(ctx, node, block, ctx.value(source)), _Mark("rows", block)
        if mark.what in ("order", "token") and known is None:
            index = self._apart(ctx, node, block, ctx.value(node.arguments["indices"][0]))
            return self._take(ctx, node, block, ctx.value(source), index, mark.share), _Mark("rows", block)
        if mark.what == "inverse" and known is not None and known.what == "rows":
            return self._take(ctx, node, block, ctx.value(source), self._inverse(ctx, block)), None
        self._unfit(node)

    def _index_put(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """The inverse of the order, or the gradients of the picks."""
        a, mark = node.arguments, self._indexed(node)
        if not isinstance(a["values"], Use) or self._mark(a["self"]) is not None:
            self._unfit(node)
        known, value = self._mark(a["values"]), ctx.value(a["values"])
        if mark.what == "order" and self._is_range(a["values"], block.size) and not a["accumulate"]:
            return DraftValue(self._inverse(ctx, block), (block.group,)), _Mark("inverse", block)
        if value.shape[:1] != (block.size,) or not self._is_zero(a["self"]):
            self._unfit(node)
        if mark.what == "sorted" and known is not None and known.what == "rows" and a["accumulate"] and len(value.dims) == 2:
            return self._bias_gradient(ctx, node, block, value), None
        if mark.what == "inverse" and known is None:
            return self._take(ctx, node, block, value, block.order), _Mark("rows", block)
        if known is not None and known.what == "rows" and (mark.what == "order" or (mark.what == "token" and a["accumulate"])):
            back = self._take(ctx, node, block, value, self._inverse(ctx, block))
            return (back if mark.what == "order" else self._sum(ctx, node, block, back, mark.share)), None
        self._unfit(node)

    def _take(self, ctx: Context, node: RawNode, block: _ExpertBlock, value: DraftValue, index: int, share: int = 1) -> DraftValue:
        """``shard.take`` of a value ``[batch * rows / share, ...]``."""
        source = self._apart(ctx, node, block, value, 0, share)
        shape, dtype = ctx.draft.tensors[source].shape, ctx.draft.dtype(value)
        attributes = {"self": Ref(0), "index": Ref(1)}
        made = ctx.draft.emit(
            "shard.take.default", (source, index), attributes, [((*shape[:1], block.rows, *shape[2:]), dtype)], raws=value.raws
        )
        return self._flat(ctx, block, made[0])

    def _bias(self, ctx: Context, node: RawNode, block: _ExpertBlock, value: DraftValue) -> DraftValue:
        """The bias of every row's expert: a row of a table, like an embedding."""
        table = ctx.draft.plain(value)
        index = self._apart(ctx, node, block, ctx.value(node.arguments["indices"][0]))
        attributes = {"weight": Ref(0), "indices": Ref(1), "padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
        result = ((block.batch, block.rows, value.shape[1]), ctx.draft.dtype(value))
        return self._flat(ctx, block, ctx.draft.emit("aten.embedding.default", (table, index), attributes, [result], raws=value.raws)[0])

    def _bias_gradient(self, ctx: Context, node: RawNode, block: _ExpertBlock, value: DraftValue) -> DraftValue:
        """The rows of every expert summed."""
        index = self._apart(ctx, node, block, ctx.value(node.arguments["indices"][0]))
        source = self._apart(ctx, node, block, value)
        shape, dtype = ctx.result(node)
        attributes = {"grad_output": Ref(0), "indices": Ref(1), "num_weights": shape[0], "padding_idx": -1, "scale_grad_by_freq": False}
        made = ctx.draft.emit("aten.embedding_dense_backward.default", (source, index), attributes, [(shape, dtype)], raws=value.raws)
        return ctx.draft.whole(made[0])

    def _sum(self, ctx: Context, node: RawNode, block: _ExpertBlock, value: DraftValue, share: int) -> DraftValue:
        """Sum of the choices of every token."""
        shape = ctx.draft.base_shape(value)
        parts = (((0, 1, block.batch),), ((1, share, block.rows // share),), ((1, 1, share),), *D.identity(shape)[2:])
        source = ctx.draft.form(value, parts)
        attributes = {"self": Ref(0), "dim": (2,), "keepdim": False, "dtype": None}
        result = ((block.batch, block.rows // share, *shape[2:]), ctx.draft.dtype(value))
        made = ctx.draft.emit("aten.sum.dim_IntList", (source,), attributes, [result])[0]
        rest = tuple(((d, 1, n),) for d, n in enumerate(shape[2:], start=2))
        return DraftValue(made, (((0, 1, block.batch), (1, 1, block.rows // share)), *rest))

    def _count(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """histc with one bin per expert."""
        a = node.arguments
        known = self._mark(a["self"])
        if known is None or known.what != "sorted" or a["min"] != 0 or a["max"] != a["bins"] - 1:
            self._unfit(node)
        source = self._apart(ctx, node, block, ctx.value(a["self"]))
        attributes = {"self": Ref(0), "bins": a["bins"]}
        made = ctx.draft.emit("shard.count.default", (source,), attributes, [((block.batch, a["bins"]), ctx.result(node)[1])])
        return ctx.draft.whole(made[0]), _Mark("counts", block)

    def _ends(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        known, value = self._mark(node.arguments["self"]), ctx.first(node)
        if known is None or known.what != "counts":
            self._unfit(node)
        shape = ctx.draft.base_shape(value)
        attributes = dict(node.arguments) | {"self": Ref(0), "dim": 1}
        return ctx.draft.whole(ctx.draft.emit(node.op, (value.base,), attributes, [(shape, ctx.result(node)[1])])[0]), _Mark("ends", block)

    def _product(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """Rows by weights, or columns by rows: the gradient of weights."""
        a = node.arguments
        one, two, ends = (self._mark(a[name]) for name in ("self", "mat2", "offs"))
        left, right = ctx.value(a["self"]), ctx.value(a["mat2"])
        if a["bias"] is not None or one is None or ends is None or ends.what != "ends" or ctx.result(node)[1] != ctx.draft.dtype(left):
            self._unfit(node)
        if one.what == "rows" and two is None and len(right.dims) == 3:
            return self._rows(ctx, node, block, left, ctx.draft.plain(right), ctx.value(a["offs"]).base), _Mark("rows", block)
        if one.what == "columns" and two is not None and two.what == "rows":
            turned = DraftValue(left.base, D.permute(left.dims, (1, 0)), left.raws)
            return self._weights(ctx, node, block, turned, right, ctx.value(a["offs"]).base), None
        self._unfit(node)

    def _fallback(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        """The op that transformers puts in the place of grouped products of other dtypes than bf16."""
        left, right, ends = self._fallback_arguments(ctx, node)
        return self._rows(ctx, node, block, left, ctx.draft.plain(right), ends), _Mark("rows", block)

    def _fallback_backward(self, ctx: Context, node: RawNode, block: _ExpertBlock) -> tuple[Result, _Mark | None]:
        left, right, ends = self._fallback_arguments(ctx, node)
        known, gradient = self._mark(node.arguments["grad_output"]), ctx.value(node.arguments["grad_output"])
        if known is None or known.what != "rows":
            self._unfit(node)
        data = self._rows(
            ctx, node, block, gradient, ctx.draft.plain(DraftValue(right.base, D.permute(right.dims, (0, 2, 1)), right.raws)), ends
        )
        self.marks[len(ctx.values), 0] = _Mark("rows", block)
        return (data, self._weights(ctx, node, block, left, gradient, ends)), None

    def _fallback_arguments(self, ctx: Context, node: RawNode) -> tuple[DraftValue, DraftValue, int]:
        a = node.arguments
        one, two, ends = (self._mark(a[name]) for name in ("input", "weight", "offs"))
        if one is None or one.what != "rows" or two is not None or ends is None or ends.what != "ends":
            self._unfit(node)
        return ctx.value(a["input"]), ctx.value(a["weight"]), ctx.value(a["offs"]).base

    def _rows(self, ctx: Context, node: RawNode, block: _ExpertBlock, left: DraftValue, weight: int, ends: int) -> DraftValue:
        source = self._apart(ctx, node, block, left)
        shape = (block.batch, block.rows, ctx.draft.tensors[weight].shape[2])
        attributes = {"self": Ref(0), "mat2": Ref(1), "offs": Ref(2)}
        made = ctx.draft.emit(
            "shard.grouped_mm.default", (source, weight, ends), attributes, [(shape, ctx.draft.dtype(left))], raws=left.raws
        )
        return self._flat(ctx, block, made[0])

    def _weights(self, ctx: Context, node: RawNode, block: _ExpertBlock, left: DraftValue, right: DraftValue, ends: int) -> DraftValue:
        one, two = self._apart(ctx, node, block, left), self._apart(ctx, node, block, right)
        tensors = ctx.draft.tensors
        shape = (tensors[ends].shape[1], tensors[one].shape[2], tensors[two].shape[2])
        operands = tuple(dict.fromkeys((one, two, ends)))
        attributes = {name: Ref(operands.index(t)) for name, t in (("self", one), ("mat2", two), ("offs", ends))}
        made = ctx.draft.emit(
            "shard.grouped_mm_weights.default", operands, attributes, [(shape, tensors[one].dtype)], raws=(*left.raws, *right.raws)
        )
        return ctx.draft.whole(made[0])

    def _apart(self, ctx: Context, node: RawNode, block: _ExpertBlock, value: DraftValue, d: int = 0, share: int = 1) -> int:
        """The tensor in which the flattened dim is ``[batch, rows / share]``."""
        group = value.dims[d]
        parts = D.reshape((group,), (block.batch, block.rows // share)) if D.size(group) == block.size // share else None
        if parts is None:
            self._unfit(node)
        return ctx.draft.form(value, (*value.dims[:d], *parts, *value.dims[d + 1 :]))

    def _flat(self, ctx: Context, block: _ExpertBlock, tensor: int) -> DraftValue:
        """``[batch, rows, ...]`` as the raw ``[batch * rows, ...]``."""
        shape = ctx.draft.tensors[tensor].shape
        return DraftValue(tensor, (block.group, *(((d, 1, n),) for d, n in enumerate(shape[2:], start=2))))

    def _inverse(self, ctx: Context, block: _ExpertBlock) -> int:
        """Sorted position by position: the order, sorted."""
        if block.inverse is None:
            shape = (block.batch, block.rows)
            attributes = {"self": Ref(0), "dim": 1, "descending": False}
            block.inverse = ctx.draft.emit("aten.sort.default", (block.order,), attributes, [(shape, "i64"), (shape, "i64")])[1]
        return block.inverse

    def _indexed(self, node: RawNode) -> _Mark:
        """The mark of the only index."""
        indices = node.arguments["indices"]
        mark = self._mark(indices[0]) if len(indices) == 1 else None
        if mark is None:
            self._unfit(node)
        return mark

    def _mark(self, use: Any) -> _Mark | None:
        return self.marks.get((use.node, use.result)) if isinstance(use, Use) else None

    def _is_range(self, use: Use, size: int) -> bool:
        a = self.nodes[use.node].arguments
        return self.nodes[use.node].op.startswith("aten.arange.") and (a.get("start", 0), a["end"], a.get("step", 1)) == (0, size, 1)

    def _is_zero(self, use: Use) -> bool:
        node = self.nodes[use.node]
        return node.op.split(".")[1] in ("zeros", "new_zeros", "zeros_like") or node.arguments.get("fill_value") == 0

    def _unfit(self, node: RawNode) -> NoReturn:
        raise UnfitError(f"{node.op} of {node.module or 'the model'} sees the order of tokens")


_SPECIAL: dict[str, Callable[[Experts, Context, RawNode, _ExpertBlock], tuple[Result, _Mark | None]]] = {
    "floor_divide": Experts._token,
    "index": Experts._index,
    "index_put": Experts._index_put,
    "_unsafe_index_put": Experts._index_put,
    "histc": Experts._count,
    "cumsum": Experts._ends,
    "_grouped_mm": Experts._product,
    "grouped_mm_fallback": Experts._fallback,
    "grouped_mm_fallback_backward": Experts._fallback_backward,
}
