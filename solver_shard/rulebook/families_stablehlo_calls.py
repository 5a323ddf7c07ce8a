"""Families of known custom calls; their rows are named ``stablehlo.custom_call@TARGET``."""

from __future__ import annotations

from solver_shard.rulebook.draft import Call
from solver_shard.rulebook.sheet import Sheet
from solver_shard.rulebook.table import Check, Family, Row


def combine(call: Call, row: Row) -> Sheet:
    """Two halves of 64-bit numbers; whole where they are the state of a random generator (``feeds_rng``)."""
    del row
    sheet = Sheet(call)
    state = call.attribute("feeds_rng", False)
    for d, size in enumerate(call.results[0].shape):
        sheet.shared(d, size, "need_replication" if state else "pass_through", blocked=state)
    return sheet


def eigh(call: Call, row: Row) -> Sheet:
    """Batch dims; rows of matrix and vectors; columns of both and the values."""
    del row
    sheet = Sheet(call)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        sheet.shared(d, shape[d])
    count = len(call.results)
    sheet.factor((rank - 2,), (rank - 2, None)[:count], shape[-2])
    sheet.factor((rank - 1,), (rank - 1, rank - 2)[:count], shape[-1])
    return sheet


def reflectors(call: Call, row: Row) -> Sheet:
    """QR and Householder products: batch dims pass; matrices are whole, as are the vectors of their reflectors.

    The vectors are the second operand or the second result.
    """
    del row
    sheet = Sheet(call)
    shape = call.operands[0].shape
    rank = len(shape)
    for d in range(rank - 2):
        sheet.shared(d, shape[d])
    operands, results = len(call.operands), len(call.results)
    for d in (rank - 2, rank - 1):
        sheet.factor((d, None)[:operands], (d, None)[:results], shape[d], "need_replication")
    vectors = (*call.operands[1:], *call.results[1:])[0]
    sheet.factor((None, rank - 2)[:operands], (None, rank - 2)[:results], vectors.shape[rank - 2], "need_replication")
    return sheet


def topk(call: Call, row: Row) -> Sheet:
    """The dim of which the largest are taken is whole, and nothing is propagated along it."""
    del row
    sheet = Sheet(call)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        sheet.shared(d, size, "pass_through" if size == made else "need_replication", blocked=size != made)
    return sheet


def partial_topk(call: Call, row: Row) -> Sheet:
    """Approximate top-k: the operands may be cut along the searched dim; what is found is whole."""
    del row
    sheet = Sheet(call)
    for d, (size, made) in enumerate(zip(call.operands[0].shape, call.results[0].shape, strict=False)):
        if size == made:
            sheet.shared(d, size)
        else:
            sheet.private(operands=d, size=size)
            sheet.private(results=d, size=made, kind="need_replication", blocked=True)
    return sheet


_NONE: dict[str, Check] = {}

FAMILIES: tuple[Family, ...] = (
    Family(name="hlo.combine", build=combine, keys=_NONE),
    Family(name="hlo.eigh", build=eigh, keys=_NONE),
    Family(name="hlo.reflectors", build=reflectors, keys=_NONE),
    Family(name="hlo.topk", build=topk, keys=_NONE),
    Family(name="hlo.partial_topk", build=partial_topk, keys=_NONE),
)
