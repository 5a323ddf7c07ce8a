"""All about a tensor of a plan: which op makes it, how its readers get it, what is kept of it, which modules hand it on.

A plan lists tensors, ops, reshards and saved tensors, each once, by position. Whoever shows or compares it asks the other way round, by
tensor: an index is made once for a plan, and each of its tables when it is first asked for.

>>> index = PlanIndex(plan)
>>> [reshard.purpose for reshard in index.reshards.get(17, ())], index.output_names[40]
(['forward', 'backward', 'update'], 'model.layers.0.mlp')

And what its collectives are for, in people's words (``purpose_of``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from solver_shard.layout import Layout
from solver_shard.plan.plan import Collective, Plan, Reshard, SavedTensor
from solver_shard.program import module_outputs

PURPOSES = (
    "parameter gathers",
    "gradient reductions",
    "gradient clipping",
    "parameter updates",
    "activations, forward",
    "activations, backward",
    "inside ops, forward",
    "inside ops, backward",
    "outputs",
)
"""What collectives are for: the rows of reports."""

OfTensor = TypeVar("OfTensor", Reshard, SavedTensor)


class PlanIndex:
    """A plan's tables by position of the tensor in ``Plan.tensors``; a tensor that has nothing in a table is no key of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def positions(self) -> dict[str, int]:
        """Position by name."""
        return {tensor.name: t for t, tensor in enumerate(self.plan.tensors)}

    @cached_property
    def makers(self) -> dict[int, int]:
        """Position of the op that makes it."""
        return {t: i for i, op in enumerate(self.plan.ops) for t in op.results}

    @cached_property
    def made_layouts(self) -> dict[int, Layout]:
        """The layout in which its op leaves it."""
        return {t: layout for op in self.plan.ops for t, layout in zip(op.results, op.result_layouts, strict=True)}

    @cached_property
    def reshards(self) -> dict[int, list[Reshard]]:
        """How its readers, the update and the step's caller get it, in the plan's order."""
        return _by_tensor(self.plan.reshards)

    @cached_property
    def saved(self) -> dict[int, list[SavedTensor]]:
        """What is kept of it between its forward readers and later ones."""
        return _by_tensor(self.plan.holds)

    @cached_property
    def gradients(self) -> dict[int, int]:
        """Of a trained parameter: the position of its gradient."""
        return {self.positions[name]: gradient for name, gradient in self.plan.gradients.items() if name in self.positions}

    @cached_property
    def parameters(self) -> dict[int, int]:
        """Of a gradient: the position of its parameter."""
        return {gradient: parameter for parameter, gradient in self.gradients.items()}

    @cached_property
    def module_outputs(self) -> dict[str, list[int]]:
        """Of a module's path: what it hands on in the forward pass."""
        return module_outputs([op for op in self.plan.ops if op.phase == "forward"], self.plan.outputs)

    @cached_property
    def output_names(self) -> dict[int, str]:
        """Of what a module hands on: the innermost such module, see ``output_names``."""
        return output_names(self.module_outputs)

    def layout(self, t: int) -> Layout:
        """The layout in which a tensor is stored or made."""
        return self.made_layouts.get(t, self.plan.tensors[t].layout)

    def owner(self, t: int) -> str:
        """A tensor's name, and of a gradient its parameter's."""
        return self.plan.tensors[self.parameters.get(t, t)].name

    def place(self, reshard: Reshard) -> str:
        """Where a reshard is, for people: the parameter (of a gradient, too), a source or output by name, else the module that makes it."""
        t, tensor = reshard.tensor, self.plan.tensors[reshard.tensor]
        stored = tensor.role in ("parameter", "buffer", "input") or reshard.purpose == "output"
        if t in self.parameters or stored or t not in self.makers:
            return self.owner(t)
        op = self.plan.ops[self.makers[t]]
        return op.module or op.name


def purpose_of_collective(plan: Plan, c: Collective) -> str:
    """Which row of ``PURPOSES`` a collective belongs to."""
    if c.reshard is not None:
        return purpose_of(plan, plan.reshards[c.reshard])
    return "gradient clipping" if c.op is None else f"inside ops, {plan.ops[c.op].phase}"


def purpose_of(plan: Plan, reshard: Reshard) -> str:
    """Which row of ``PURPOSES`` a reshard belongs to."""
    if reshard.purpose in ("accumulate", "optimizer"):
        return "gradient reductions"
    if reshard.purpose == "update":
        return "parameter updates"
    if reshard.purpose == "output":
        return "outputs"
    if plan.tensors[reshard.tensor].role == "parameter":
        return "parameter gathers"
    return f"activations, {reshard.purpose}"


def output_names(outputs: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Every module output by its innermost module; numbered where a module has several that no inner one names."""
    innermost: dict[int, str] = {}
    for path in sorted(outputs, key=lambda path: -path.count(".")):
        for t in outputs[path]:
            innermost.setdefault(t, path)
    shared: dict[str, list[int]] = {}
    for t, path in sorted(innermost.items()):
        shared.setdefault(path, []).append(t)
    return {t: path if len(alike) == 1 else f"{path}:out.{k}" for path, alike in shared.items() for k, t in enumerate(alike)}


def _by_tensor(parts: Iterable[OfTensor]) -> dict[int, list[OfTensor]]:
    table: dict[int, list[OfTensor]] = {}
    for part in parts:
        table.setdefault(part.tensor, []).append(part)
    return table
