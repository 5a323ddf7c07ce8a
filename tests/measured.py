"""The bytes that one device really holds while a plan runs: storages, from when they are made until nothing refers to them.

>>> measured = measure(plan, program, values)
>>> measured.peak, measured.totals[measured.peak_time] == measured.peak
(1163264, True)

A meter counts the storages of device 0, which holds the fullest shard of everything. A storage is there until the last tensor
that lies in it is gone, as a real allocator sees it: a tensor and its views count once. Nothing of the plan's own arithmetic of
lives is used: what the simulation still refers to is there, and what it does not is gone.

Counted are parameters, buffers, inputs, optimizer states and master weights, results of ops, copies, and what the steps of a transition
make, with the buffers of their collectives; and what torch's own optimizer makes when it steps the shards of device 0. Not counted is
what lives inside an op alone: the scratch of a kernel.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.costs.memory import WAYS
from solver_shard.errors import InputError
from solver_shard.ops.run import DTYPES
from solver_shard.options import Options
from solver_shard.plan.plan import CATEGORIES, Plan
from solver_shard.program import Program
from solver_shard.verification.simulate import simulate

STATES = ("parameters", "optimizer", "gradients", "inputs")
"""Categories of what is there because of the model, not because of how the step runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes on device 0 over one step; time is the position of the running op, the update runs at the last time.

    Attributes:
        totals: the most bytes at any instant of each time.
        series: by category, the bytes at that instant; transitions' intermediates are a category of their own.
    """

    totals: tuple[int, ...]
    series: Mapping[str, tuple[int, ...]]

    @property
    def peak(self) -> int:
        """The most bytes at any instant."""
        return max(self.totals)

    @property
    def peak_time(self) -> int:
        """The first time at which that many are there."""
        return self.totals.index(self.peak)


def measure(plan: Plan, program: Program, values: Mapping[int, torch.Tensor]) -> Measured:
    """Run one step of a plan with all devices in this process and count the bytes of device 0.

    Args:
        program: the one that the plan was made for.
        values: whole tensors of the program's sources by position.

    Raises:
        InputError: the plan has several microbatches, or as ``simulate``.
        InternalError: as ``simulate``.
    """
    if plan.options.microbatches > 1:
        raise InputError(f"a step of {plan.options.microbatches} microbatches is not measured; plan one with a single microbatch")
    meter = Meter()
    simulate(plan, program, values, meter=meter)
    return meter.result()


class Meter:
    """Counts storages by category; ``simulate`` tells it of every tensor that it makes on device 0."""

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.category: dict[int, str] = {}
        self.times: list[dict[str, int]] = []

    def tick(self) -> None:
        """The next time begins."""
        self.times.append(dict(self.live))

    def made(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor is there; one in a storage that is known already adds nothing, but a gradient or copy gives it its category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.category:
            self.live[category] += storage.nbytes()
            weakref.finalize(storage, functools.partial(self._gone, key, storage.nbytes()))
            self.category[key] = category
        elif self.category[key] in ("activations", "copies", "intermediates") and category in ("gradients", "copies"):
            self.live[self.category[key]] -= storage.nbytes()
            self.live[category] += storage.nbytes()
            self.category[key] = category
        if sum(self.live.values()) >= sum(self.times[-1].values()):
            self.times[-1] = dict(self.live)

    def step(self, options: Options, shards: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """The optimizer steps: shape and dtype of each parameter's shard in its state's layout. Parameters and states are there already."""
        state = options.optimizer_state()
        dtypes = [DTYPES["f32" if state.master_bytes(dtype) else dtype] for _, dtype in shards]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for (shape, _), dtype in zip(shards, dtypes, strict=True)]
        ways = WAYS.get(options.optimizer)
        with torch.enable_grad():
            optimizer = torch.optim.SGD(parameters) if ways is None else torch.optim.AdamW(parameters, **ways)
        gradients = [torch.zeros(shape, dtype=DTYPES[state.gradient_dtype(dtype)]) for shape, dtype in shards]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()  # its states come to be
        for parameter in parameters:
            parameter.grad = None
        with _Made(self, [*parameters, *gradients, *(x for kept in optimizer.state.values() for x in kept.values())]):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()

    def _gone(self, key: int, nbytes: int) -> None:
        self.live[self.category.pop(key)] -= nbytes

    def result(self) -> Measured:
        return Measured(
            totals=tuple(sum(row.values()) for row in self.times),
            series={category: tuple(row[category] for row in self.times) for category in self.live},
        )


class _Made(TorchDispatchMode):
    """Tells a meter of every tensor that is made, in a storage that is not among those of the known ones."""

    def __init__(self, meter: Meter, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.meter, self.known = meter, {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known:
                self.meter.made(item, "optimizer")
        return made
