"""Gradients in a simulated step, from where they are made to the parameters they step: accumulated, reduced, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from solver_shard.errors import InternalError
from solver_shard.export.collectives import World
from solver_shard.export.interpret import DTYPES
from solver_shard.export.shards import Parts, coordinates, join, move, split
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan, Reshard
from solver_shard.program import Program

_AGREE = 1e-5
"""Largest relative difference between the norms that two devices find."""


def squares(part: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of the squares of what a tensor holds; of complex numbers, of their sizes."""
    return (torch.view_as_real(part) if part.is_complex() else part).to(dtype).square().sum()


class Gradients:
    """The gradients of one step of a plan, on all devices; ``tell`` hears of every tensor that a reshard makes, and what it is.

    Attributes:
        stepped: positions of the parameters that have an optimizer, with the reshards of their new values.
    """

    def __init__(self, plan: Plan, program: Program, world: World, tell: Callable[[Parts, str], Parts]) -> None:
        self.tell = tell
        self.plan, self.program, self.world, self.mesh = plan, program, world, plan.mesh
        self.stepped = {reshard.tensor: reshard for reshard in plan.reshards if reshard.purpose == "update"}
        self.found: dict[int, tuple[Parts, Layout]] = {}

    def reshard(self, reshard: Reshard, parts: Parts, layout: Layout) -> Parts:
        """Run the collectives of a reshard; those of gradients in the dtype that they are reduced in."""
        tensor = self.program.tensors[reshard.tensor]
        what = "copies"
        if reshard.purpose in ("accumulate", "optimizer"):
            dtype = DTYPES[self.plan.options.reduce_dtype or tensor.dtype]
            parts, what = self.tell(tuple(part.to(dtype) for part in parts), "gradients"), "gradients"
        for step in reshard.steps:
            if step.before != layout:
                raise InternalError(f"a reshard of {tensor.name!r} is {layout} where its next step starts from {step.before}")
            stages = self.world.stages(step, tensor.shape)
            for k, stage in enumerate(stages):
                last = step is reshard.steps[-1] and k == len(stages) - 1
                made = stage(parts)
                if reshard.purpose != "update":
                    self.tell(made, what if last else "intermediates")
                elif made[0].untyped_storage()._cdata != parts[0].untyped_storage()._cdata:  # what is stepped is there already
                    self.tell(made, "intermediates")  # the new values, too: the old ones take them over
                parts = made  # what a stage reads is there until its result is
                del made
            layout = step.after
        if layout != reshard.layout:
            raise InternalError(f"the reshard of {tensor.name!r} ends in {layout}, its readers get {reshard.layout}")
        return parts

    def add(self, reshard: Reshard, parts: Parts) -> None:
        """Take what a microbatch has made of a gradient, 1/N of it where there are N."""
        count, t = self.plan.options.microbatches, reshard.tensor
        parts = tuple(part / count for part in parts) if count > 1 else parts
        if t in self.found:
            parts = tuple(whole + part for whole, part in zip(self.found[t][0], parts, strict=True))
        self.found[t] = parts, reshard.layout

    def handed_over(self) -> dict[str, torch.Tensor]:
        """Reduce what is accumulated; the whole gradients by parameter name."""
        last = {reshard.tensor: reshard for reshard in self.plan.reshards if reshard.purpose == "optimizer"}
        for g in self.program.gradients.values():
            if g not in self.found or g not in last:
                raise InternalError(f"the plan brings {self.program.tensors[g].name!r} nowhere at the end of the step")
        if self.plan.options.microbatches > 1:
            self.found = {g: (self.reshard(reshard, *self.found[g]), reshard.layout) for g, reshard in last.items()}
        whole = {g: join(*self.found[g], self.program.tensors[g].shape, self.mesh) for g in self.program.gradients.values()}
        return {self.program.tensors[p].name: whole[g] for p, g in self.program.gradients.items()}

    def slices(self) -> dict[int, Parts]:
        """What each optimizer state reads, by parameter."""
        return {
            p: move(*self.found[self.program.gradients[p]], reshard.source, self.program.tensors[p].shape, self.mesh)
            for p, reshard in self.stepped.items()
        }

    def clip(self, slices: dict[int, Parts], max_norm: float) -> float:
        """Scale the slices in place of the gradients that they are, so that the norm of all is at most ``max_norm``; the norm before."""
        clip = self.plan.clip
        axes = () if clip is None else clip.axes
        summed = [self.mesh.index(name) for name in axes]
        totals: list[torch.Tensor] = []
        for device, at in enumerate(coordinates(self.mesh)):
            total = torch.zeros(1, dtype=torch.float32)
            for p, parts in slices.items():
                state = self.stepped[p].source
                if not any(at[a] for a in summed if not state[a].is_shard):  # what several devices of a group hold counts once
                    total += squares(parts[device])
            totals.append(total)
        if clip is not None:
            totals = list(self.world.all_reduce(totals, "sum", axes))
        norms = torch.cat(totals).sqrt()
        if norms.max() - norms.min() > _AGREE * norms.max():
            raise InternalError(f"devices find different gradient norms, {norms.min():g} to {norms.max():g}")
        for p, parts in slices.items():
            slices[p] = tuple(part * (max_norm / (norm + 1e-6)).clamp(max=1.0) for part, norm in zip(parts, norms, strict=True))
        return float(norms[0])

    def whole(self, slices: Mapping[int, Parts]) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, put together from what the states read."""
        return {
            self.program.tensors[p].name: join(parts, self.stepped[p].source, self.program.tensors[p].shape, self.mesh)
            for p, parts in slices.items()
        }

    def updated(self, p: int, parameter: torch.Tensor, slices: Parts, rate: float) -> torch.Tensor:
        """The whole parameter after a gradient step on the shards of its state."""
        reshard = self.stepped[p]
        stepped = [part - rate * slope for part, slope in zip(split(parameter, reshard.source, self.mesh), slices, strict=True)]
        if self.plan.options.optimizer_state().master_bytes(self.program.tensors[p].dtype):
            self.tell(tuple(stepped), "intermediates")
        parts = self.reshard(reshard, tuple(stepped), reshard.source)
        return join(parts, self.plan.tensors[p].layout, tuple(parameter.shape), self.mesh)
