"""The last steps of cleaning: returned tensors, peepholes, dead ops, names, and the Program itself; checkpointed regions computed again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor
from solver_shard.tracing.clean.draft import Context, DraftOp, ProgramDraft
from solver_shard.tracing.joint_graph import RawGraph


def finish(context: Context, raw: RawGraph) -> tuple[Program, dict[int, int]]:
    """Return what the raw graph returns; drop what nothing needs. With it, where the tensors of the draft are in the program."""
    draft = context.draft
    gradients: dict[int, int] = {}
    for parameter, use in raw.gradients:
        draft.node = raw.nodes[use.node]
        tensor = draft.plain(context.value(use))
        source = context.values[parameter][0]
        assert source is not None
        if source.base in gradients:
            tensor = _accumulate(draft, gradients[source.base], tensor)
        gradients[source.base] = tensor
    sources = {v.base for node, values in zip(raw.nodes, context.values, strict=True) if node.source is not None for v in values if v}
    taken = set(sources)
    for parameter, tensor in gradients.items():
        gradients[parameter] = tensor = _own(draft, tensor, taken)
        taken.add(tensor)
    outputs: list[tuple[str, int]] = []
    for name, use in raw.outputs:
        draft.node = raw.nodes[use.node]
        tensor = _own(draft, draft.plain(context.value(use)), taken)
        taken.add(tensor)
        outputs.append((name, tensor))
    kept = {t for _, t in outputs} | set(gradients.values())
    ops = _simple(draft, _in_order(draft.ops), kept)
    ops = _simple(draft, view_weights_again(draft, recompute(draft, ops, kept)), kept)
    return _program(raw, draft, ops, outputs, gradients)


def _simple(draft: ProgramDraft, ops: list[DraftOp], kept: set[int]) -> list[DraftOp]:
    """Without views of views, neutral views and dead ops."""
    for _ in range(2):
        ops = _needed(ops, kept)
        _peephole(draft, ops, kept)
    return _needed(ops, kept)


def _own(draft: ProgramDraft, tensor: int, taken: set[int]) -> int:
    """A tensor that is returned twice, or is a source, is returned as a copy (``random``: each copy is its own)."""
    if tensor not in taken:
        return tensor
    found = draft.tensors[tensor]
    return draft.emit("aten.clone.default", (tensor,), {"self": Ref(0)}, [(found.shape, found.dtype)], random=True)[0]


def _accumulate(draft: ProgramDraft, one: int, two: int) -> int:
    """The gradient of a tied parameter is the sum over its uses."""
    if one == two:
        return draft.emit("aten.mul.Scalar", (one,), {"self": Ref(0), "other": 2}, [(draft.tensors[one].shape, draft.tensors[one].dtype)])[
            0
        ]
    attributes = {"self": Ref(0), "other": Ref(1), "alpha": 1}
    return draft.emit("aten.add.Tensor", (one, two), attributes, [(draft.tensors[one].shape, draft.tensors[one].dtype)])[0]


def _in_order(ops: list[DraftOp]) -> list[DraftOp]:
    """Forward before backward; stable. What reads a backward tensor (a view that backward made first) is backward too."""
    late: set[int] = set()
    for op in ops:
        if op.phase is Phase.BACKWARD or not late.isdisjoint(op.operands):
            op.phase = Phase.BACKWARD
            late.update(op.results)
    forward = [op for op in ops if op.phase is Phase.FORWARD]
    return forward + [op for op in ops if op.phase is Phase.BACKWARD]


def _needed(ops: list[DraftOp], kept: set[int]) -> list[DraftOp]:
    """Ops that something returned depends on."""
    wanted, result = set(kept), []
    for op in reversed(ops):
        if any(t in wanted for t in op.results):
            wanted.update(op.operands)
            result.append(op)
    result.reverse()
    return result


def _peephole(draft: ProgramDraft, ops: list[DraftOp], kept: set[int]) -> None:
    """Views of views become one; a sole permute of an einsum moves into its equation."""
    makers = {t: op for op in ops for t in op.results}
    readers: dict[int, list[DraftOp]] = {}
    for op in ops:
        for t in op.operands:
            readers.setdefault(t, []).append(op)
    alias: dict[int, int] = {}
    for op in ops:
        if any(t in alias for t in op.operands):
            _rename(op, alias)
        if op.name not in ("aten.view.default", "aten.permute.default"):
            continue
        source, result = op.operands[0], op.results[0]
        maker = makers.get(source)
        if maker is None:
            continue
        if maker.name == op.name:
            _compose(op, maker)
            if len(readers[source]) == 1:
                op.raw[:0] = maker.raw
            source = op.operands[0]
            if _is_identity(draft, op) and result not in kept:
                alias[result] = source
                draft.replaced[result] = source, tuple(range(len(draft.tensors[source].shape)))
            continue
        sole = len(readers[source]) == 1 and source not in kept and maker.phase is op.phase
        if not sole:
            continue
        if op.name != "aten.permute.default" or maker.name != "aten.einsum.default":
            continue
        inputs, out = maker.attributes["equation"].split("->")
        maker.attributes["equation"] = inputs + "->" + "".join(out[i] for i in op.attributes["dims"])
        maker.raw.extend(op.raw)
        maker.results = [result]
        draft.replaced[source] = result, tuple(op.attributes["dims"].index(d) for d in range(len(out)))
        makers[result] = maker
        op.results = []


def _compose(op: DraftOp, maker: DraftOp) -> None:
    """op(maker(x)) as op(x)."""
    if op.name == "aten.permute.default":
        first = maker.attributes["dims"]
        op.attributes["dims"] = tuple(first[i] for i in op.attributes["dims"])
    op.operands = list(maker.operands)


def _is_identity(draft: ProgramDraft, op: DraftOp) -> bool:
    if op.name == "aten.permute.default":
        return tuple(op.attributes["dims"]) == tuple(range(len(op.attributes["dims"])))
    return draft.tensors[op.operands[0]].shape == draft.tensors[op.results[0]].shape


def _rename(op: DraftOp, alias: dict[int, int]) -> None:
    """Read other tensors; operands that become equal stay apart."""
    op.operands = [alias.get(t, t) for t in op.operands]


def _program(
    raw: RawGraph, draft: ProgramDraft, ops: list[DraftOp], outputs: list[tuple[str, int]], gradients: dict[int, int]
) -> tuple[Program, dict[int, int]]:
    sources = [t for t, tensor in enumerate(draft.tensors) if tensor.name]
    tensors: list[Tensor] = [draft.tensors[t] for t in sources]
    position = {t: i for i, t in enumerate(sources)}
    used = {t.name for t in tensors}
    special: dict[int, tuple[str, Role]] = {}
    for parameter, gradient in gradients.items():
        special[gradient] = (f"grad({draft.tensors[parameter].name})", Role.GRADIENT)
    for label, tensor in outputs:
        special[tensor] = (label, Role.OUTPUT)
    used.update(label for label, _ in special.values())
    counts: dict[str, int] = {}
    final: list[Op] = []
    for op in ops:
        stem = _stem(op, counts)
        for j, t in enumerate(op.results):
            label, role = special.get(t) or (_name(op, stem, j, used), Role.ACTIVATION)
            position[t] = len(tensors)
            tensors.append(replace(draft.tensors[t], name=label, role=role))
        final.append(
            Op(
                name=op.name,
                operands=tuple(position[t] for t in op.operands),
                results=tuple(position[t] for t in op.results),
                attributes=op.attributes,
                phase=op.phase,
                module=op.module,
                raw=tuple(op.raw),
                recompute=op.recompute,
            )
        )
    program = Program(
        name=raw.name,
        tensors=tuple(tensors),
        ops=tuple(final),
        outputs=tuple(position[t] for _, t in outputs),
        gradients={position[p]: position[g] for p, g in gradients.items()},
        ties={other: first for other, first in raw.ties.items() if first in {draft.tensors[t].name for t in sources}},
    )
    program.validate()
    return program, position


def _stem(op: DraftOp, counts: dict[str, int]) -> str:
    """``model.layers.0.mlp.mul``, in backward ``model.layers.0.mlp.backward.mul``, ``.recompute.mul``; repeats are numbered from 1."""
    parts = [op.module] if op.module else []
    if op.phase is Phase.BACKWARD:
        parts.append("recompute" if op.recompute else "backward")
    parts.append(op.name.split(".")[1])
    stem = ".".join(parts)
    number = counts[stem] = counts.get(stem, -1) + 1
    return f"{stem}.{number}" if number else stem


def _name(op: DraftOp, stem: str, result: int, used: set[str]) -> str:
    """A name that no other tensor has; one of several results carries its number in brackets."""
    wanted = f"{stem}[{result}]" if len(op.results) > 1 else stem
    label, number = wanted, 1
    while label in used:
        label, number = f"{wanted}~{number}", number + 1
    used.add(label)
    return label


Region = tuple[int, ...]


def recompute(draft: ProgramDraft, ops: list[DraftOp], kept: Collection[int]) -> list[DraftOp]:
    """The ops with every region computed again in backward.

    Activation checkpointing: what a checkpointed region computes is not kept until the backward pass, but computed again there.

    torch's joint graph holds the forward pass of a region once, and its backward ops read those values, as if they had been
    kept. Here the backward ops of a region get values of their own: copies of the region's forward ops, right before its
    first backward op that needs one, which read what the region read (parameters, and values from outside that are kept):

        forward     x -> up -> gelu -> y                        x -> up -> gelu -> y
        backward    gelu_backward(dy, up)               up' = up(x), gelu_backward(dy, up')

    Only ops that a needed value depends on are copied, as torch stops a recomputation early. A region inside a region is
    computed once more when the outer one has been: its outer copies are thrown away in their turn. An op that keeps what it
    made (selective checkpointing) is not copied. Views of a value belong to the value's region, whoever asks for them.
    Constants are kept.

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
    draft: ProgramDraft, executed: list[DraftOp], backward: list[DraftOp], kept: Collection[int], depth: int
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


def view_weights_again(draft: ProgramDraft, ops: list[DraftOp]) -> list[DraftOp]:
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


def _copy(draft: ProgramDraft, op: DraftOp, own: dict[int, int], *, recompute: bool = True) -> DraftOp:
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
