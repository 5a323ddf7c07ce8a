"""Activation checkpointing: what a checkpointed region computes is not kept until the backward pass, but computed again there.

torch's joint graph holds the forward pass of a region once, and its backward ops read those values, as if they had been
kept. Here the backward ops of a region get values of their own: copies of the region's forward ops, right before its
first backward op that needs one, which read what the region read (parameters, and values from outside that are kept):

    forward     x -> up -> gelu -> y                        x -> up -> gelu -> y
    backward    gelu_backward(dy, up)               up' = up(x), gelu_backward(dy, up')

Only ops that a needed value depends on are copied, as torch stops a recomputation early. A region inside a region is
computed once more when the outer one has been: its outer copies are thrown away in their turn. An op that keeps what it
made (selective checkpointing) is not copied. Views of a value belong to the value's region, whoever asks for them.
Constants are kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from solver_shard.frontends.draft import Draft, DraftOp
from solver_shard.program import Phase, Role

Region = tuple[int, ...]


def recompute(draft: Draft, ops: list[DraftOp], kept: Collection[int]) -> list[DraftOp]:
    """The ops with every region computed again in backward.

    Args:
        ops: forward before backward, nothing unused among them.
        kept: tensors that the step returns.
    """
    if not any(op.region for op in ops):
        return ops
    executed = _executed(ops)
    early = {id(op) for op in executed}
    backward = [op for op in ops if op.phase is Phase.BACKWARD and id(op) not in early]
    depth = 0
    while any(len(op.region) > depth for op in executed):
        blocks, executed = _again(draft, executed, backward, kept, depth)
        ops = [each for op in ops for each in (*blocks.get(id(op), ()), op)]
        depth += 1
    return ops


def _executed(ops: list[DraftOp]) -> list[DraftOp]:
    """The forward ops, and the views of forward values that backward ops asked for, each with its region."""
    makers: dict[int, DraftOp] = {}
    for op in ops:
        viewed = makers.get(op.operands[0]) if op.view else None
        if op.view and (viewed is not None or op.phase is Phase.FORWARD):
            op.region = viewed.region if viewed is not None else ()
        elif op.phase is not Phase.FORWARD:
            continue
        makers.update(dict.fromkeys(op.results, op))
    return list({id(op): op for op in makers.values()}.values())


def _again(
    draft: Draft, executed: list[DraftOp], backward: list[DraftOp], kept: Collection[int], depth: int
) -> tuple[dict[int, list[DraftOp]], list[DraftOp]]:
    """Copies of the regions of one depth by the op before which they run, and all copies; ``backward`` ops then read copies."""
    inside = {t: op.region[: depth + 1] for op in executed if len(op.region) > depth for t in op.results}
    shown = {t for op in executed for t in op.operands if t in inside and op.region[: depth + 1] != inside[t]} | {*kept}
    wanted: dict[Region, set[int]] = {}
    first: dict[Region, DraftOp] = {}
    readers: list[tuple[DraftOp, int]] = []
    for op in backward:
        for j, t in enumerate(op.operands):
            region = inside.get(t)
            if region is not None and (op.region[: depth + 1] == region or t not in shown):
                wanted.setdefault(region, set()).add(t)
                first.setdefault(region, op)
                readers.append((op, j))
    needed: dict[Region, list[DraftOp]] = {region: [] for region in wanted}
    for op in reversed(executed):
        region = op.region[: depth + 1]
        if region in wanted and any(t in wanted[region] for t in op.results):
            wanted[region].update(op.operands)
            needed[region].append(op)
    blocks: dict[int, list[DraftOp]] = {}
    copies: list[DraftOp] = []
    made: dict[int, int] = {}
    for region, found in needed.items():
        own: dict[int, int] = {}
        block = [_copy(draft, op, own) for op in reversed(found)]
        made |= own
        copies += block
        blocks.setdefault(id(first[region]), []).extend(block)
    for op, j in readers:
        op.operands[j] = made[op.operands[j]]
    return blocks, copies


def view_weights_again(draft: Draft, ops: list[DraftOp]) -> list[DraftOp]:
    """The ops with views of parameters made once more for the backward pass, right before its first op that reads one.

    torch keeps a view of a weight from forward to backward, and that costs nothing: it is the weight's own storage. Were it one
    tensor here, too, whoever gathers the weight would have to hold the gathered weight as long. Fully sharded data parallelism
    does not: it frees the storage after the forward pass and gathers it again, whatever views torch has kept.
    """
    parameters = {t for t, tensor in enumerate(draft.tensors) if tensor.role is Role.PARAMETER}
    views: dict[int, DraftOp] = {}
    own: dict[int, int] = {}
    result: list[DraftOp] = []

    def again(t: int) -> list[DraftOp]:
        view = views.get(t)
        if view is None or t in own:
            return []
        return [*again(view.operands[0]), _copy(draft, view, own, recompute=False)]

    for op in ops:
        if op.phase is Phase.BACKWARD:
            for t in op.operands:
                result += again(t)
            op.operands = [own.get(t, t) for t in op.operands]
        elif op.view and (op.operands[0] in parameters or op.operands[0] in views):
            views.update(dict.fromkeys(op.results, op))
        result.append(op)
    return result


def _copy(draft: Draft, op: DraftOp, own: dict[int, int], *, recompute: bool = True) -> DraftOp:
    """The op once more, in backward, on what was computed again where it was; ``own`` gets its results."""
    results = []
    operands = [own.get(t, t) for t in op.operands]
    for t in op.results:
        own[t] = len(draft.tensors)
        results.append(own[t])
        draft.tensors.append(replace(draft.tensors[t], name=""))
    again = replace(op, operands=operands, results=results, attributes=dict(op.attributes), raw=list(op.raw))
    again.phase, again.recompute = Phase.BACKWARD, recompute
    return again
