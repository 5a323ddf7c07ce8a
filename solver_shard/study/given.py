"""Plans for other tools as plans of ours: what transformers or ``parallelize_module`` would run, collective by collective.

>>> followed = follow(read_parallelize(text, name="tp.py"), program, mesh)
>>> plan_program(followed.program, options=replace(options, template=followed.template, ...), narrow=followed.narrow, ...)

:mod:`solver_shard.study.borders` says what moves along the tensor axis. On it the choice graph is narrowed to that: how every op runs,
how every parameter is stored, its optimizer state like it. On the other axes, about which styles say nothing, the plan follows a
template: ``zero3`` (as transformers' and torch's ``fully_shard`` do) or another one, by the name that ``Given.data`` has.

What is counted: the collectives of forward and backward along the tensor axis are those that the tool issues, in number, kind and bytes
(held against real processes in ``tests/study/test_given_processes.py``). What a tool leaves to the training loop is the plan's own: the
gradients of parameters that are whole, and were used on cut activations, go to their parameters' layout before the update; along data
axes it is what the template says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver_shard.baselines.masks import narrowed
from solver_shard.choice.nodes import Kind, Lowering
from solver_shard.costs.model import CostModel
from solver_shard.errors import InputError, InternalError
from solver_shard.layout import Placement
from solver_shard.mesh import Mesh
from solver_shard.names import fold_names
from solver_shard.program import Program, Role
from solver_shard.rulebook.build import Rulebook
from solver_shard.study.borders import Bordered, bordered
from solver_shard.study.styles import Given, Style, module_styles, read_parallelize, read_tp_plan

__all__ = ["Followed", "Given", "Style", "follow", "read_parallelize", "read_tp_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A given plan, followed through a program.

    Attributes:
        axis: position of the tensor axis.
        template: of all axes; ``free`` on the tensor axis, whose choices ``narrow`` takes away.
        whole: matrices that no style names.
    """

    given: Given
    bordered: Bordered
    mesh: Mesh
    axis: int
    template: str
    whole: tuple[str, ...]

    @property
    def program(self) -> Program:
        """With a place for every border."""
        return self.bordered.program

    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan must know."""
        name, others = self.mesh.names[self.axis], [axis for a, axis in enumerate(self.mesh.names) if a != self.axis]
        said = [f"what {self.given.tool} runs along {name}" + (f"; {', '.join(others)} by {self.given.data}" if others else "")]
        if self.whole:
            adds = "; transformers adds the rules of the model's class, write down model.tp_plan" if self.given.prefixed else ""
            said.append(f"no rule names {', '.join(self.whole)}: whole along {name}{adds}")
        return (*said, *fold_names(self.bordered.notes))

    def narrow(self, lowering: Lowering, costs: CostModel, rulebook: Rulebook) -> tuple[Lowering, str]:
        """The lowering with what is given as its only choice along the tensor axis, and what a plan records of it."""
        masks: dict[int, NDArray[np.bool_]] = {}
        for v, node in enumerate(lowering.nodes):
            if node.kind in (Kind.SOURCE, Kind.STATE):
                wanted = self.bordered.stored[node.item]
                masks[v] = np.array([_cut(layout[self.axis]) == _cut(wanted) for layout in node.layouts])
            elif node.kind is Kind.OP:
                masks[v] = self._agreeing(lowering, node.item)
            if v in masks and not masks[v].any():
                where = lowering.program.ops[node.item] if node.kind is Kind.OP else lowering.program.tensors[node.item]
                raise InternalError(f"{self.given.name}: the choice graph has no such strategy of {where.name}")
        return narrowed(lowering, masks), f"{self.given.tool}: {self.given.name}"

    def _agreeing(self, lowering: Lowering, i: int) -> NDArray[np.bool_]:
        """The strategies of an op that run it as is given along the tensor axis."""
        column, way = lowering.strategies[i], self.bordered.ways[i]
        wanted = [
            k
            for k, single in enumerate(column.single)
            if (single.operands, single.results) == (way.operands, way.results)
            and (single.implementation.name if single.implementation else "") == way.implementation
        ]
        found: NDArray[np.bool_] = np.isin(column.axis_choice[:, self.axis], wanted)
        return found


def follow(given: Given, program: Program, mesh: Mesh, rulebook: Rulebook | None = None) -> Followed:
    """Follow a given plan through a program.

    Raises:
        InputError: its patterns match nothing, it is for another mesh, or it does not compute what the model computes.
    """
    name = given.axis or ("tp" if "tp" in mesh.names else mesh.names[-1])
    axis = mesh.index(name)
    size = mesh.shape[axis]
    if given.size is not None and given.size != size:
        raise InputError(f"{given.name} is for {given.size} tensor-parallel devices, and {name} of {mesh} has {size}; make it for {size}")
    if size == 1:
        raise InputError(f"{given.name} is about an axis of several devices, and {name} of {mesh} has one; name another axis")
    styles = module_styles(given, program)
    made = bordered(program, styles, size, rulebook or Rulebook())
    whole = [
        tensor.name
        for tensor in program.tensors
        if tensor.role is Role.PARAMETER and len(tensor.shape) > 1 and tensor.name.rpartition(".")[0] not in styles
    ]
    return Followed(
        given=given,
        bordered=made,
        mesh=mesh,
        axis=axis,
        template=",".join(f"{other}={'free' if a == axis else given.data}" for a, other in enumerate(mesh.names)),
        whole=tuple(fold_names(whole)),
    )


def _cut(placement: Placement) -> int:
    """The dim that is cut, in whatever order; -1 for none."""
    return placement.dim if placement.is_shard else -1
