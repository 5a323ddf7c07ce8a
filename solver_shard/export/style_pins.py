"""Pins from the styles by which other tools say tensor parallelism: a module's weights are cut by columns or rows, or whole.

>>> weight_pins({"layers.*.up_proj": "columns"}, program, "tp")
('layers.0.up_proj.weight=tp=S(0)', 'layers.0.up_proj.bias=tp=S(0)')

By columns is the next to last dim (the output features of nn.Linear), by rows the last one (its input features; biases stay whole).
Embeddings are the other way round, as their weight is [words, features]: rows are words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from solver_shard.errors import InputError
from solver_shard.names import Paths, check_patterns, suggestion
from solver_shard.program import Program, Role

Cut = Literal["columns", "rows", "whole"]


def weight_pins(cuts: Mapping[str, Cut], program: Program, axis: str) -> tuple[str, ...]:
    """One pin per parameter that the patterns match, in the program's order.

    Args:
        cuts: module or parameter pattern to how it is cut; ``*`` stands for a layer's number (or any name between dots).
        program: of the model that the pins are for.
        axis: the mesh axis that cuts.

    Raises:
        InputError: a pattern matches nothing, or two patterns disagree on a parameter.
    """
    check_patterns(cuts, "the styles")
    parameters = {t: tensor for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER}
    looked_up = {t for op in program.ops if op.name == "aten.embedding.default" for t in op.operands if t in parameters}
    names = [tensor.name for tensor in parameters.values()]
    paths, positions = Paths([*names, *(name.rpartition(".")[0] for name in names)]), list(parameters)
    found: dict[str, tuple[str, str]] = {}
    for pattern, cut in cuts.items():
        matched = [positions[k] for k in sorted({k % len(names) for k in paths.matching(pattern)})]
        for t in matched:
            tensor = parameters[t]
            placement = _placement(cut, len(tensor.shape), tensor.name.rpartition(".")[2], embedding=t in looked_up)
            before = found.setdefault(tensor.name, (placement, pattern))
            if before[0] != placement:
                raise InputError(f"{before[1]!r} and {pattern!r} disagree on {tensor.name}: {before[0]} and {placement}; drop one of them")
        if not matched:
            raise InputError(f"no module or parameter of {program.name} is called {pattern!r}; {suggestion(pattern, names, program.ties)}")
    return tuple(f"{name}={axis}={found[name][0]}" for name in names if name in found)


def _placement(cut: Cut, dims: int, name: str, *, embedding: bool) -> str:
    if cut == "whole" or not dims or (cut == "rows" and (name == "bias" or dims == 1)):
        return "R"
    if embedding:
        return "S(1)" if cut == "columns" else "S(0)"
    return f"S({max(dims - 2, 0)})" if cut == "columns" else f"S({dims - 1})"
