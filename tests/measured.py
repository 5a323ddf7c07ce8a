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

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from solver_shard.errors import InputError
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.verification.measurement import Meter
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
    return counted(meter)


def counted(meter: Meter) -> Measured:
    """What a meter has counted."""
    return Measured(
        totals=tuple(sum(row.values()) for row in meter.times),
        series={category: tuple(row[category] for row in meter.times) for category in meter.live},
    )
