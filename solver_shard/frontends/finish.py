"""The last steps of cleaning: returned tensors, peepholes, dead ops, names, and the Program itself."""

from __future__ import annotations

from dataclasses import replace

from solver_shard.frontends.context import Context
from solver_shard.frontends.draft import Draft, DraftOp
from solver_shard.frontends.raw import RawGraph
from solver_shard.frontends.recompute import recompute, view_weights_again
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor


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


def _simple(draft: Draft, ops: list[DraftOp], kept: set[int]) -> list[DraftOp]:
    """Without views of views, neutral views and dead ops."""
    for _ in range(2):
        ops = _needed(ops, kept)
        _peephole(draft, ops, kept)
    return _needed(ops, kept)


def _own(draft: Draft, tensor: int, taken: set[int]) -> int:
    """A tensor that is returned twice, or is a source, is returned as a copy (``random``: each copy is its own)."""
    if tensor not in taken:
        return tensor
    found = draft.tensors[tensor]
    return draft.emit("aten.clone.default", (tensor,), {"self": Ref(0)}, [(found.shape, found.dtype)], random=True)[0]


def _accumulate(draft: Draft, one: int, two: int) -> int:
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


def _peephole(draft: Draft, ops: list[DraftOp], kept: set[int]) -> None:
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


def _is_identity(draft: Draft, op: DraftOp) -> bool:
    if op.name == "aten.permute.default":
        return tuple(op.attributes["dims"]) == tuple(range(len(op.attributes["dims"])))
    return draft.tensors[op.operands[0]].shape == draft.tensors[op.results[0]].shape


def _rename(op: DraftOp, alias: dict[int, int]) -> None:
    """Read other tensors; operands that become equal stay apart."""
    op.operands = [alias.get(t, t) for t in op.operands]


def _program(
    raw: RawGraph, draft: Draft, ops: list[DraftOp], outputs: list[tuple[str, int]], gradients: dict[int, int]
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
