"""Linear algebra on matrices: decompositions, inverses, solutions, of every matrix of a batch by itself.

A row says how many dims of each argument and each result belong to one matrix, vector or number; all dims before them are a batch,
broadcast as torch does it, and only these may be cut, for a decomposition looks at a whole matrix:

    "aten.linalg_lu_factor_ex.default" = { family = "matrices", operands = "A=2", results = "2 1 0" }

The right-hand sides of a solution do not see each other either, and it is linear in them:

    "aten.linalg_solve_triangular.default" = { family = "matrices", operands = "self=2 B=2", results = "2", columns = "B", linear = "B" }
"""

from __future__ import annotations

import math
import re
from typing import Any

from solver_shard.errors import RuleError
from solver_shard.layout import P
from solver_shard.rules.draft import DimFactors, OpCall, RuleDraft
from solver_shard.rules.families.pointwise import broadcast
from solver_shard.rules.row import Family, is_text

_OPERANDS = re.compile(r"\w+=[012]( \w+=[012])*\Z")
_RESULTS = re.compile(r"[012]( [012])*\Z")


def matrices(call: OpCall, *, operands: str, results: str, columns: str | None = None, linear: str = "") -> RuleDraft:
    """The batch passes; ``columns`` names the argument whose columns (rows, where ``left`` is false) are those of the first result.

    ``linear`` arguments make the first result pending; the others do not depend on them. A result that lacks a dim of the batch
    follows from operands that lack it. Results that are switched off are empty.
    """
    draft = RuleDraft(call)
    ranks = {name: int(rank) for name, rank in (item.split("=") for item in operands.split())}
    own = tuple(map(int, results.split()))
    if len(own) != len(call.results):
        raise RuleError(f"{call.name}: its row names {len(own)} results, the call has {len(call.results)}; correct the row")
    for name in linear.split():
        if _vectors(call, name):
            ranks[name], own = 1, (1, *own[1:])
    tensors = [(call.at(slot).shape, ranks[name]) for name, slots in call.names.items() if name in ranks for slot in slots]
    batch: tuple[int, ...] = ()
    for shape, rank in tensors:
        if len(shape) < rank:
            raise RuleError(f"{call.name}: an operand of shape {shape} has fewer dims than the {rank} that its row says; correct the row")
        batch = _broadcast(batch, shape[: len(shape) - rank])
    lead = draft.letters(batch)
    column = draft.factor(draft.letter(), _columns(call, columns)) if columns is not None and ranks[columns] == 2 else ()
    at = -1 if call.attribute("left", True) else -2

    def placed(shape: tuple[int, ...], rank: int, held: DimFactors) -> list[DimFactors]:
        dims = [*broadcast(call, shape[: len(shape) - rank], batch, lead), *draft.whole(shape[len(shape) - rank :])]
        if held:
            dims[at] = held
        return dims

    for name, rank in ranks.items():
        for slot in call.names.get(name, ()):
            draft.put_slot(slot, placed(call.at(slot).shape, rank, column if name == columns else ()))
    for index, (result, rank) in enumerate(zip(call.results, own, strict=True)):
        if not result.numel and len(result.shape) - rank != len(batch):
            draft.alike.append(index)
            continue
        dims = placed(result.shape, rank, () if index else column)
        draft.result(index, dims)
        for factor in (*lead, column):
            if factor and factor not in dims:
                draft.restrict(factor, apart=(index,))
    for name in linear.split():
        draft.linear((name,), ("sum", "avg"), fixed=range(1, len(own)))
    draft.flops = 2 * max((math.prod(shape) * shape[-1] for shape, rank in tensors if rank == 2), default=0)
    return draft


def _vectors(call: OpCall, name: str) -> bool:
    """Whether the right-hand sides are one vector for each matrix, as torch takes them for it."""
    if call.name != "aten._linalg_solve_ex.default":
        return False
    one, other = (call.at(slots[0]).shape for slots in (call.names[next(iter(call.names))], call.names[name]))
    return len(other) == 1 or other == one[:-1]


def _columns(call: OpCall, name: str) -> int:
    return call.shape(name)[-1 if call.attribute("left", True) else -2]


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


def _is_operands(value: Any) -> str | None:
    return None if isinstance(value, str) and _OPERANDS.match(value) else 'must give every argument its dims, as in "A=2 pivots=1"'


def _is_results(value: Any) -> str | None:
    return None if isinstance(value, str) and _RESULTS.match(value) else 'must give every result its dims, as in "2 1 0"'


def trace(call: OpCall) -> RuleDraft:
    """The sum of a matrix's diagonal: ``own-rows`` and ``own-columns`` add up the part of it that lies in a device's rows or columns."""
    draft = RuleDraft(call)
    rows, columns = draft.letters(call.shape("self"))
    draft.put("self", [rows, columns])
    draft.result(0, ())
    draft.linear(("self",), ("sum", "avg"))
    draft.implement("own-rows", rows, results={0: P("sum")})
    draft.implement("own-columns", columns, results={0: P("sum")})
    draft.flops = min(call.shape("self"))
    return draft


def renorm(call: OpCall) -> RuleDraft:
    """Slices along ``dim``, each by itself."""
    draft = RuleDraft(call)
    shape = call.shape("self")
    dim = call.dim(call.attributes["dim"], len(shape))
    held = draft.letters(shape, whole=[d for d in range(len(shape)) if d != dim])
    draft.put("self", held)
    draft.result(0, held)
    draft.flops = 3 * math.prod(shape)
    return draft


FAMILIES = (
    Family(name="trace", build=trace),
    Family(name="renorm", build=renorm),
    Family(
        name="matrices",
        build=matrices,
        keys={"operands": _is_operands, "results": _is_results, "columns": is_text, "linear": is_text},
        required=("operands", "results"),
    ),
)
