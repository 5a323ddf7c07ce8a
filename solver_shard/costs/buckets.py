"""Which collectives share a launch: fully sharded training moves the parameters of one block together.

>>> unit_of("model.layers.3.mlp.up_proj.weight"), unit_of("lm_head.weight")
('model.layers.3', '')

A **bucket** holds the parameters of one unit and dtype that are moved for one purpose: gathered for the forward or the
backward pass, gathered after the update, or, as gradients, reduced for it: into an accumulator, or to the update. A unit is
what users hand to ``fully_shard``: the module down to the first number in its path (a block of a numbered stack), and the
model itself for all parameters outside of blocks. PyTorch FSDP gathers and reduces a unit with one collective (Zhao et al.,
"PyTorch FSDP", VLDB 16(12), 2023, section 3.2); DDP reduces buckets of gradients (Li et al., "PyTorch Distributed", VLDB
13(12), 2020, section 3.2).

**Price.** Every member pays 1/k of the launch and of the latency per hop, k being the number of members, and its own bytes in
full; each step is rounded up. k is counted on the program, once and for all, so that the price of a tensor does not depend on
what others decide. Where all k members take the same step, the sum is the time of the one collective that moves them
together (at most k ns more by rounding, and less where the fastest algorithm for one of them is not the fastest for all).

**What is launched.** Steps of one bucket with the same collective, the same axes and the same place in their transitions are one
launch (``launch_of``); all others are launches of their own. So where only some members move, or by other collectives, or on other axes,
there are fewer tensors per launch than k says and the price is too low: k members that move by m launches pay for one of the m, and a
block that reduce-scatters its matrices and all-reduces its norms launches twice and pays once. What is left out is known exactly once a
plan is: ``unshared_ns`` is, over all launches, the time of the collective that moves the launch's bytes together less what its members
pay, where that is more. Every plan states it beside its time, and price + ``unshared_ns`` is never below the time of its launches. It is
no part of the objective, because no sum of prices of single tensors can be exact (one member that moves alone needs a whole launch).

**Limits.** The objective, and so the proof, is about the price without ``unshared_ns``; plans whose blocks move alike have none. Memory
is not bucketed: a gathered parameter is counted from its own first reader, not from that of the whole unit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from solver_shard.program import Program, Role

REDUCED = ("accumulate", "optimizer")
GATHERED = ("forward", "backward", "update")


def unit_of(name: str) -> str:
    """The unit of a parameter: its path up to the first part that is a number, "" where there is none."""
    parts = name.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        if part.isdecimal():
            return ".".join(parts[:depth])
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """One step of a transition of a tensor in a bucket: the launch that it is part of, its bytes, and what it pays."""

    launch: Hashable
    kind: str
    axes: tuple[int, ...]
    nbytes: int
    nanoseconds: int
    runs: int = 1
    """How often it is made in a step: once, or for every microbatch; the same for all of a launch."""


def launch_of(purpose: str, parameter: str, dtype: str, number: int, kind: str, axes: tuple[Hashable, ...]) -> Hashable:
    """What steps of one launch have in common; ``number`` counts the steps of a transition."""
    return purpose, unit_of(parameter), dtype, number, kind, axes


def unshared_ns(steps: Iterable[Paid], collective_ns: Callable[[str, tuple[int, ...], int], int]) -> int:
    """Nanoseconds that launches take beyond what the members of their buckets pay for them (see the module)."""
    launches: dict[Hashable, list[Paid]] = {}
    for step in steps:
        launches.setdefault(step.launch, []).append(step)
    missing = 0
    for members in launches.values():
        whole = collective_ns(members[0].kind, members[0].axes, sum(step.nbytes for step in members))
        missing += members[0].runs * max(0, whole - sum(step.nanoseconds for step in members))
    return missing


def bucket_sizes(program: Program, moves: Iterable[tuple[int, str]]) -> Mapping[tuple[int, str], int]:
    """How many tensors share the launch of each move that is in a bucket; all others have one of their own.

    Args:
        moves: (tensor position, purpose) of everything that may be moved; purposes as in ``Reshard.purpose``.
    """
    parameter_of = {gradient: parameter for parameter, gradient in program.gradients.items()}
    bucket: dict[tuple[int, str], tuple[str, str, str]] = {}
    members: dict[tuple[str, str, str], set[int]] = {}
    for t, purpose in moves:
        tensor = program.tensors[t]
        if purpose in REDUCED and t in parameter_of:
            unit = unit_of(program.tensors[parameter_of[t]].name)
        elif purpose in GATHERED and tensor.role is Role.PARAMETER:
            unit = unit_of(tensor.name)
        else:
            continue
        bucket[t, purpose] = key = (purpose, unit, tensor.dtype)
        members.setdefault(key, set()).add(t)
    return {move: len(members[key]) for move, key in bucket.items()}
