"""Layouts that experts write, as restrictions of the sources of a choice graph: warm starts for the solver.

Each template says how parameters, buffers and inputs are laid out; the solver fills in the rest.

- ``replicate``: everything whole on every device.
- ``data-parallel``: inputs cut by batch on all axes, parameters whole.
- ``fully-sharded``: inputs cut by batch on all axes, parameters cut on all axes (Rajbhandari et al., "ZeRO", stage 3).
- ``megatron`` and ``megatron-fully-sharded``: on the innermost axis, matrices that feed a residual addition are cut by
  rows, the others by columns (Shoeybi et al., "Megatron-LM"); the other axes as above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from solver_shard.baselines.masks import Masks, folded_masks
from solver_shard.choice.fold import Folded
from solver_shard.choice.heads import heads_of
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.layout import Layout, R
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Role
from solver_shard.solve.solution import WarmStart

_THROUGH = ("aten.view.default", "aten.native_dropout.default", "aten.permute.default", "aten._to_copy.default")


def warm_starts(
    lowering: Lowering, folded: Folded | None = None, mesh: Mesh | None = None, others: Mapping[str, Masks] | None = None
) -> tuple[WarmStart, ...]:
    """Other baselines by name, then the templates, as restrictions of the graph's nodes (of the folded graph's, when there is one).

    Given the mesh, tensor parallelism goes over all parts of an innermost axis that is split.
    """
    found = {**(others or {}), **_templates(lowering, mesh)}
    return tuple(WarmStart(name=name, allowed=folded_masks(masks, folded)) for name, masks in found.items())


def _templates(lowering: Lowering, mesh: Mesh | None) -> dict[str, Masks]:
    program = lowering.program
    rows = row_cut(program)
    axes = len(next((n.layouts[0] for n in lowering.nodes if n.kind is Kind.SOURCE), ()))
    inner = min(mesh.positions(mesh.whole.names[-1])) if mesh is not None else axes - 1
    heads = heads_of(program, rows)

    def shape_of(t: int) -> tuple[int, ...]:
        return program.tensors[t].shape

    def by_batch(layout: Layout, outer_only: bool) -> int:
        """How well an input's layout is a cut of its batch dim."""
        wanted = [0 if a < inner or not outer_only else -1 for a in range(axes)]
        return sum(int(p) == w for p, w in zip(layout, wanted, strict=True)) if all(p in (R, 0) for p in layout) else -1

    def whole(t: int, layout: Layout) -> int:
        return sum(p == R for p in layout)

    def sharded(t: int, layout: Layout) -> int:
        return sum(2 * (p != R) + (p.is_shard and p.dim == 0) for p in layout)

    def megatron(outer: Callable[[int, Layout], int]) -> Callable[[int, Layout], int]:
        def score(t: int, layout: Layout) -> int:
            cut = heads[t].cut_by(mesh.shape[inner:]) if mesh is not None and inner < axes - 1 and t in heads else (True,) * (axes - inner)
            wanted = [rows.get(t, R) if here else R for here in cut]
            found = sum(int(p) == int(w) for p, w in zip(layout[inner:], wanted, strict=True))
            return 100 * found + outer(t, Layout((*layout[:inner], *(R,) * (axes - inner))))

        return score

    wholly = {"replicate": (whole, None), "data-parallel": (whole, False), "fully-sharded": (sharded, False)}
    split = {"megatron": (megatron(whole), True), "megatron-fully-sharded": (megatron(sharded), True)} if axes else {}
    found: dict[str, Masks] = {}
    for name, (score, outer_only) in {**wholly, **split}.items():
        masks = {}
        for v, node in enumerate(lowering.nodes):
            if node.kind is not Kind.SOURCE:
                continue
            if program.tensors[node.item].role is Role.INPUT and outer_only is not None and shape_of(node.item):
                scores = np.array([by_batch(layout, outer_only) for layout in node.layouts])
            else:
                scores = np.array([score(node.item, layout) for layout in node.layouts])
            masks[v] = scores == scores.max()
        found[name] = masks
    return found


def row_cut(program: Program, whole: tuple[str, ...] = ()) -> dict[int, int]:
    """For every parameter that Megatron would cut: the dim, by what its product feeds.

    A matrix whose product reaches an addition of two activations (the residual) is cut along the contracted dim, other
    matrices along the output dim, and a bias like the output it is added to. A matrix whose product reaches an op named
    in ``whole``, through views and additions, is not cut.
    """
    readers = program.readers()
    made = {t: i for i, op in enumerate(program.ops) for t in op.results}
    cut: dict[int, int] = {}
    for op in program.ops:
        if op.phase is not Phase.FORWARD or op.name != "aten.einsum.default" or len(op.operands) != 2:
            continue
        x, w = op.operands
        if program.tensors[w].role is not Role.PARAMETER or program.tensors[x].role is Role.PARAMETER:
            continue
        if whole and reaches(program, readers, op.results[0], whole):
            continue
        left, result = op.attributes["equation"].split("->")
        letters = left.split(",")[1]
        residual, biases = _follow(program, readers, made, op.results[0])
        contracted = [d for d, letter in enumerate(letters) if letter not in result]
        output = [d for d, letter in enumerate(letters) if letter in result]
        chosen = contracted if residual else output
        if chosen:
            cut[w] = chosen[0]
        if not residual:
            cut.update(dict.fromkeys(biases, 0))
    return cut


def _follow(program: Program, readers: Mapping[int, list[tuple[int, int]]], made: Mapping[int, int], start: int) -> tuple[bool, list[int]]:
    """Whether a tensor reaches a residual addition through views, dropout, gates and bias additions; and those biases."""
    pending, seen = [start], {start}
    biases: list[int] = []
    while pending:
        t = pending.pop()
        for i, j in readers.get(t, ()):
            op = program.ops[i]
            if op.phase is not Phase.FORWARD:
                continue
            if op.name == "aten.add.Tensor" and len(op.operands) == 2:
                other = op.operands[1 - j]
                if program.tensors[other].role is Role.PARAMETER:
                    biases.append(other)
                elif made.get(other, -1) < made[start]:  # older than the product: the residual stream
                    return True, biases
            elif op.name not in _THROUGH and not _is_gated(program, op, t):
                continue
            if op.results[0] not in seen:
                seen.add(op.results[0])
                pending.append(op.results[0])
    return False, biases


def _is_gated(program: Program, op: Op, t: int) -> bool:
    """Whether an op multiplies a tensor by one number per row, as the gate of a shared expert does."""
    if op.name != "aten.mul.Tensor" or len(op.operands) != 2:
        return False
    (gate,) = (program.tensors[x].shape for x in op.operands if x != t) if t in op.operands and len({*op.operands}) == 2 else ((),)
    shape = program.tensors[t].shape
    return len(gate) == len(shape) and gate[-1:] == (1,) and shape[-1] > 1


def reaches(program: Program, readers: Mapping[int, list[tuple[int, int]]], start: int, names: tuple[str, ...]) -> bool:
    pending, seen = [start], {start}
    while pending:
        for i, _ in readers.get(pending.pop(), ()):
            op = program.ops[i]
            if op.name in names:
                return True
            if op.name in (*_THROUGH, "aten.add.Tensor") and op.results[0] not in seen:
                seen.add(op.results[0])
                pending.append(op.results[0])
    return False
