"""StableHLO families of products, convolutions, triangular solves and reshapes."""

from __future__ import annotations

import math

from solver_shard.rulebook.draft import Call
from solver_shard.rulebook.sheet import Sheet
from solver_shard.rulebook.table import Check, Family, Row


def dot_general(call: Call, row: Row) -> Sheet:
    """Batch dims, free dims of the left side, free dims of the right side, then contracted dims, which are summed."""
    del row
    sheet = Sheet(call)
    left, right = call.operands[0].shape, call.operands[1].shape
    batch = tuple(zip(call.attribute("lhs_batching_dimensions", ()), call.attribute("rhs_batching_dimensions", ()), strict=True))
    summed = tuple(zip(call.attribute("lhs_contracting_dimensions", ()), call.attribute("rhs_contracting_dimensions", ()), strict=True))
    made = 0
    for a, b in batch:
        sheet.factor((a, b), (made,), left[a])
        made += 1
    for side, shape in enumerate((left, right)):
        bound = {pair[side] for pair in (*batch, *summed)}
        for d, size in enumerate(shape):
            if d not in bound:
                sheet.factor((d, None) if side == 0 else (None, d), (made,), size)
                made += 1
    for a, b in summed:
        sheet.factor((a, b), (None,), left[a], "reduction", reduction="sum")
    return sheet


def dot(call: Call, row: Row) -> Sheet:
    """A product of matrices or vectors: rows, columns, then the contracted dim."""
    del row
    sheet = Sheet(call)
    left, right = call.operands[0].shape, call.operands[1].shape
    made = 0
    if len(left) == 2:
        sheet.factor((0, None), (made,), left[0])
        made += 1
    if len(right) == 2:
        sheet.factor((None, 1), (made,), right[1])
    sheet.factor((len(left) - 1, 0), (None,), left[-1], "reduction", reduction="sum")
    return sheet


def convolution(call: Call, row: Row) -> Sheet:
    """Batch groups, batch, per spatial dim its windows and the positions in a window, feature groups, features in, features out.

    A spatial dim of the input can be cut by windows (the output's dim) or within windows (the kernel's dim), whichever is
    larger first; in conservative mode spatial dims are not cut.
    """
    del row
    sheet = Sheet(call)
    at = call.attributes
    lhs, kernel, out = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    batch, feature = at["input_batch_dimension"], at["input_feature_dimension"]
    kernel_in, kernel_out = at["kernel_input_feature_dimension"], at["kernel_output_feature_dimension"]
    out_batch, out_feature = at["output_batch_dimension"], at["output_feature_dimension"]
    batch_groups, feature_groups = call.attribute("batch_group_count", 1), call.attribute("feature_group_count", 1)
    if batch_groups > 1:
        sheet.factor((batch, kernel_out), (out_feature,), batch_groups)
    sheet.factor((batch, None), (out_batch,), out[out_batch])
    spatial = zip(at["input_spatial_dimensions"], at["kernel_spatial_dimensions"], at["output_spatial_dimensions"], strict=True)
    for d, k, o in () if call.conservative else spatial:
        left = lhs[d]
        for size, windows in sorted(((out[o], True), (kernel[k], False)), key=lambda pair: -pair[0]):
            share = min(left, size)
            if share > 1:
                if windows:
                    sheet.factor((d, None), (o,), share, "permutation")
                else:
                    sheet.factor((d, k), (None,), share, "reduction", reduction="sum")
                left //= share
    if feature_groups > 1:
        sheet.factor((feature, kernel_out), (out_feature,), feature_groups)
    sheet.factor((feature, kernel_in), (None,), kernel[kernel_in], "reduction", reduction="sum")
    per_group = out[out_feature] // (batch_groups * feature_groups)
    if per_group > 1:
        sheet.factor((None, kernel_out), (out_feature,), per_group)
    return sheet


def triangular_solve(call: Call, row: Row) -> Sheet:
    """Batch dims pass; the free dim, the solved dim and the contracted dim are gathered."""
    del row
    sheet = Sheet(call)
    a, b = call.operands[0].shape, call.operands[1].shape
    rank = len(a)
    transposed = call.attribute("transpose_a", "NO_TRANSPOSE") in ("TRANSPOSE", "ADJOINT")
    # In a x = b the rows of a are free, in x a = b its columns.
    free, contracted = (rank - 1, rank - 2) if transposed == call.attributes["left_side"] else (rank - 2, rank - 1)
    for d in range(rank - 2):
        sheet.shared(d, a[d])
    if call.attributes["left_side"]:
        sheet.factor((free, rank - 2), (None,), a[free], "need_replication")
        sheet.factor((None, rank - 1), (rank - 1,), b[-1], "need_replication")
        sheet.factor((contracted, None), (rank - 2,), a[contracted], "need_replication")
    else:
        sheet.factor((None, rank - 2), (rank - 2,), b[-2], "need_replication")
        sheet.factor((free, rank - 1), (None,), a[free], "need_replication")
        sheet.factor((contracted, None), (rank - 1,), a[contracted], "need_replication")
    return sheet


def reshape(call: Call, row: Row) -> Sheet:
    """Factors that split and merge dims: common ones while both sides are in step, private ones until they are again.

    Each side opens its dims one after the other and keeps the product of what it opened and of the factors it gave out; the
    quotient is what is next to be covered.
    """
    del row
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in (*source, *target):
        return Sheet.without(call)
    sheet = Sheet(call)
    sides = (_Cursor(source), _Cursor(target))
    left, right = sides
    while not (left.done and right.done):
        alone = next((side for side in sides if side.at_one), None)
        if alone is not None:
            sheet.factor(*_places(left, right, alone), 1)
            alone.skip()
            continue
        ahead, behind = left.next(), right.next()
        common = math.gcd(ahead, behind)
        if left.given == right.given:
            if common > 1:
                sheet.factor((left.dim,), (right.dim,), common)
                left.give(common)
                right.give(common)
            else:
                sheet.factor((left.dim,), (None,), ahead)
                sheet.factor((None,), (right.dim,), behind)
                left.give(ahead)
                right.give(behind)
        else:
            late, early = sides if left.given < right.given else (right, left)
            size = _catch_up(late, early, common)
            sheet.factor(*_places(left, right, late), size)
            late.give(size)
    return sheet


class _Cursor:
    """A side of a reshape: the dim it is at, the product of the dims it opened, and that of the factors it gave."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dim = 0
        self.opened = 1
        self.given = 1
        self.open = False

    @property
    def done(self) -> bool:
        return self.dim == len(self.shape)

    @property
    def at_one(self) -> bool:
        """At a dim of size 1 that is not open."""
        return not self.done and not self.open and self.shape[self.dim] == 1

    def skip(self) -> None:
        self.dim += 1

    def next(self) -> int:
        """What is left to cover of the dim, which is opened if it was not."""
        if not self.done and not self.open:
            self.opened *= self.shape[self.dim]
            self.open = True
        return self.opened // self.given

    def give(self, size: int) -> None:
        """A factor was given out; the dim is done when it is covered."""
        self.given *= size
        if self.opened == self.given:
            self.dim += 1
            self.open = False


def _catch_up(late: _Cursor, early: _Cursor, common: int) -> int:
    """The size of the private factor of the side that is behind."""
    left = late.next()
    ratio, rest = divmod(early.given, late.given)
    if rest == 0 and left % ratio == 0:
        return ratio
    return left // common if left > common else left


def _places(left: _Cursor, right: _Cursor, side: _Cursor) -> tuple[tuple[int | None], tuple[int | None]]:
    return (left.dim if side is left else None,), (right.dim if side is right else None,)


_NONE: dict[str, Check] = {}

FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.dot_general", build=dot_general, keys=_NONE),
    Family(name="hlo.dot", build=dot, keys=_NONE),
    Family(name="hlo.convolution", build=convolution, keys=_NONE),
    Family(name="hlo.triangular_solve", build=triangular_solve, keys=_NONE),
    Family(name="hlo.reshape", build=reshape, keys=_NONE),
)
