"""What a step is called with, and the part of it that a device reads.

>>> given = Given(plan, program, device_mesh, device, example, names)
>>> given.bind((), {"input_ids": ids, "labels": labels})
{16: tensor(...), 17: tensor(...)}

Plain tensors are whole: every process passes the same, and each takes its part. DTensors are taken as they are laid out where that is
the plan's layout, and are redistributed where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from solver_shard.errors import InputError
from solver_shard.export.interpret import DTYPES
from solver_shard.export.shards import Box, boxes, plain
from solver_shard.frontends.torch import argument_names
from solver_shard.plan.plan import Plan, PlannedTensor


class Given:
    """The inputs of a plan on one device.

    Args:
        model: whose forward says the names of positional arguments.
        example: the inputs that the model was traced with, where the caller gave some: what is no tensor in them is part of the graph.
    """

    def __init__(self, model: nn.Module, plan: Plan, device_mesh: DeviceMesh, device: int, example: Any) -> None:
        self.model, self.mesh, self.device_mesh = model, plan.mesh, device_mesh
        self.inputs: dict[str, tuple[int, PlannedTensor, tuple[slice, ...] | None]] = {}
        for t, tensor in enumerate(plan.tensors):
            if tensor.role == "input":
                box = boxes(tensor.layout, tensor.shape, plan.mesh)[device]
                whole = Box((0,) * len(tensor.shape), tensor.shape)
                name = tensor.name.removeprefix("input.")
                self.inputs[name] = t, tensor, None if box == whole else box.inside(whole)
        self.fixed: dict[str, Any] = {}
        if example is not None:
            args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(_tuple(example)), {})
            self.fixed = {name: leaf for name, leaf in self._leaves(args, kwargs).items() if not isinstance(leaf, torch.Tensor)}

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Local tensors by position in the program.

        Raises:
            InputError: an input is missing, is not part of the step, or has another shape or dtype than the plan was made for.
        """
        given = dict(kwargs) if not args and self._is_flat(kwargs) else self._leaves(args, kwargs)
        made = {}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                if name not in self.inputs:
                    raise InputError(f"input {name!r} is not one of the plan's; it has {', '.join(self.inputs)}")
                t, tensor, place = self.inputs[name]
                made[t] = self._local(name, value, tensor, place)
            elif value is not None and (name not in self.fixed or self.fixed[name] != value):
                raise InputError(
                    f"{name}={value!r} was given, but the plan's step was traced {_with(name, self.fixed)}; make a plan for it, or give "
                    "apply the example inputs that the plan was made with (inputs=...)"
                )
        if len(made) < len(self.inputs):
            raise InputError(f"input {next(n for n, (t, *_) in self.inputs.items() if t not in made)!r} of the step is missing")
        return made

    def _is_flat(self, kwargs: Mapping[str, Any]) -> bool:
        return all(isinstance(value, torch.Tensor) for value in kwargs.values())

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Nested arguments by the names that tracing gives them."""
        positional = argument_names(self.model, len(args))
        found = {}
        for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)), is_leaf=lambda value: isinstance(value, DTensor))[0]:
            keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path[1:]]
            if getattr(path[0], "idx", 1) == 0:
                keys[0] = positional[int(keys[0])]
            found[".".join(keys)] = leaf
        return found

    def _local(self, name: str, value: torch.Tensor, tensor: PlannedTensor, place: tuple[slice, ...] | None) -> torch.Tensor:
        if tuple(value.shape) != tensor.shape:
            raise InputError(
                f"input {name!r} has shape {list(value.shape)}, the plan was made for {list(tensor.shape)}: the whole batch of one step "
                "(of one microbatch of it), in every process, or a DTensor of that shape; make a plan for other sizes"
            )
        if value.dtype != DTYPES[tensor.dtype]:
            raise InputError(f"input {name!r} has dtype {value.dtype}, the plan was made for {DTYPES[tensor.dtype]}; convert it")
        if isinstance(value, DTensor):
            placements = tuple(tensor.layout.to_dtensor(self.mesh.shape))
            if value.device_mesh != self.device_mesh:
                raise InputError(f"input {name!r} is a DTensor on another mesh, {value.device_mesh}; the plan's is {self.device_mesh}")
            if tuple(value.placements) != placements:
                value = value.redistribute(self.device_mesh, placements)
            return value.to_local()
        part = plain(value) if place is None else plain(value[place]).contiguous()
        return part.to(self.device_mesh.device_type)


def _tuple(example: Any) -> tuple[Any, ...]:
    return (example,) if isinstance(example, torch.Tensor) else tuple(example)


def _with(name: str, fixed: Mapping[str, Any]) -> str:
    return f"with {name}={fixed[name]!r}" if name in fixed else "without it"
