"""What is legal of the arguments of ``api.optimize``, said before the model is traced; what they mean is written there."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from solver_shard.codec import MAY_LACK
from solver_shard.costs.memory import OPTIMIZERS, OptimizerState, optimizer_state
from solver_shard.errors import InputError
from solver_shard.program import Relays
from solver_shard.rules.rulebook import Rulebook
from solver_shard.rules.table import RulesFile, load_table
from solver_shard.text import format_bytes

if TYPE_CHECKING:
    from solver_shard.costs.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
        batch, seq, dtype: of a step where the command line knows them, else None; the batch of all microbatches together.
        microbatches: how many times a step runs forward and backward, each time on its part of the batch, before its update.
        optimizer: adamw (torch's default on accelerators, all parameters at once), adamw-fused, adamw-forloop, sgd or none.
        master_weights: whether parameters of 16 bits or less have an f32 copy that the optimizer steps.
        state_bytes: of optimizer state per parameter element; None for the optimizer's own.
        reduce_dtype: in which gradients are reduced, accumulated and read by the update; None for their own.
        clip: whether gradients are clipped to a norm before the update.
        forward_only: whether the step has no backward pass and no update.
        checkpoint: whether every layer of a preset or config was checkpointed.
        overlap: part of parameter gathers and gradient reductions that is hidden behind compute, 0 to 1.
        fusion: whether pointwise chains are priced as fused.
        memory_limit: bytes per device.
        reserve: bytes of the limit that no tensor may have; every plan keeps peak + reserve <= memory_limit.
        objective: time, or memory (the peak).
        memory_weight: nanoseconds per MiB of peak added to the time objective.
        pins: as the user wrote them.
        split: auto (one axis into sub-axes where counts of heads ask for it), off, or the split that the user gave, ``tp=8x2``.
        template: the expert's plan to which the search was narrowed, one name per mesh axis, as the user wrote it; else None.
        rules: the user's own rules files, whole, so that a plan can be evaluated without them.
        conservative: whether only equal shards were allowed, and none that cut a dim inside.
        trust_dtensor: whether strategies that torch registers with DTensor were taken without proof.
        propagation: the greedy pass or baseline whose answer the plan keeps; else None.
        tied: whether copies of a repeated layer share one decision.
        gap, time_limit, work_limit, seed: when the solver stops; seconds for the time limit.
        total_time_limit: seconds for tracing, pricing and solving together, or None.
    """

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    microbatches: int = 1
    optimizer: str = "adamw"
    master_weights: bool = True
    state_bytes: int | None = None
    reduce_dtype: str | None = None
    clip: bool = False
    forward_only: bool = False
    checkpoint: bool = False
    overlap: float = 0.0
    fusion: bool = False
    memory_limit: int
    reserve: int = 0
    objective: Literal["time", "memory"] = "time"
    memory_weight: int = 0
    pins: tuple[str, ...] = ()
    split: str = "auto"
    template: str | None = None
    rules: tuple[RulesFile, ...] = ()
    conservative: bool = False
    trust_dtensor: bool = field(default=False, metadata=MAY_LACK)
    propagation: str | None = None
    tied: bool = True
    gap: float = 1e-4
    time_limit: float = 60.0
    total_time_limit: float | None = None
    work_limit: float | None = None
    seed: int = 0

    @property
    def usable_memory(self) -> int:
        """Bytes per device that tensors may have: the limit less the reserve."""
        return self.memory_limit - self.reserve

    @property
    def prices_memory(self) -> bool:
        """Whether bytes are part of what is minimised."""
        return self.objective == "memory" or self.memory_weight > 0

    @property
    def relays(self) -> Relays:
        """Where a graph for these options has relays if nothing else is said: everywhere where bytes count."""
        return "everywhere" if self.prices_memory else "shared"

    def rulebook(self) -> Rulebook:
        """The rules that these options ask for: the shipped rows and the user's; RuleError where a row of theirs is not legal."""
        return Rulebook(load_table(self.rules), conservative=self.conservative, trust_dtensor=self.trust_dtensor)

    def optimizer_state(self) -> OptimizerState:
        """What these options say is kept and moved per element of a trained parameter; InputError where they are not legal."""
        name = "none" if self.forward_only else self.optimizer
        return optimizer_state(
            name,
            master_weights=self.master_weights,
            state_bytes=self.state_bytes,
            reduce_dtype=self.reduce_dtype,
            clip=self.clip,
        )


MAX_MEMORY_WEIGHT = 10**9
MAX_MICROBATCHES = 4096
MAX_WORKERS = 256


def check_reserve(limit: int, reserve: int, cluster: Cluster) -> None:
    if reserve >= limit:
        raise InputError(
            f"a reserve of {format_bytes(reserve)} leaves nothing of the memory limit of {format_bytes(limit)}; give a larger --memory, "
            f"or a smaller --reserve (the one of cluster {cluster.name} is {format_bytes(cluster.device.reserve)}; 0 for none)"
        )


def check_optimizer(options: Options) -> None:
    """An optimizer that is known, with a state that something keeps."""
    if not isinstance(options.optimizer, str):
        raise InputError(f"optimizer {options.optimizer!r} is not known; legal: {', '.join(OPTIMIZERS)}")
    optimizer_state(
        options.optimizer,
        master_weights=options.master_weights,
        state_bytes=options.state_bytes,
        reduce_dtype=options.reduce_dtype,
        clip=options.clip,
    )
    if options.forward_only and (options.clip or options.reduce_dtype is not None):
        what = "clipping" if options.clip else f"a reduce dtype of {options.reduce_dtype}"
        raise InputError(f"{what} was asked with a forward-only step, which has no gradients; drop one of the two")
    if options.state_bytes is not None and (options.forward_only or options.optimizer == "none"):
        what = "a forward-only step" if options.forward_only else "optimizer none"
        raise InputError(f"{options.state_bytes} bytes of optimizer state were asked with {what}, which keeps none; drop one of the two")


def check_microbatches(microbatches: int, batch: int | None, *, forward_only: bool) -> int:
    if not _is_number(microbatches, whole=True) or not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InputError(f"microbatches {microbatches!r} is not legal; give a whole number, 1 to {MAX_MICROBATCHES}")
    if microbatches > 1 and forward_only:
        raise InputError("a forward-only step has no gradients to accumulate; plan one microbatch, and leave --microbatches out")
    if batch is not None and _is_number(batch, whole=True) and batch % microbatches:
        near = [n for n in range(1, min(batch, MAX_MICROBATCHES) + 1) if batch % n == 0]
        closest = sorted(near, key=lambda n: abs(n - microbatches))[:2]
        raise InputError(
            f"a batch of {batch} cannot be run in {microbatches} equal microbatches; give a number that divides it, as "
            f"{' or '.join(map(str, closest))}"
        )
    return int(microbatches)


def part_of(batch: int | None, microbatches: int) -> int | None:
    """The batch of one microbatch; what is no number is left for the frontend to refuse."""
    return batch // microbatches if batch is not None and microbatches > 1 and _is_number(batch, whole=True) else batch


def yes_or_no(name: str, value: object) -> bool:
    """A flag; numbers and texts would look as if they meant more."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not legal; give True or False")
    return value


def check_called(**functions: object) -> None:
    """What is called while the solver runs, by name; a path for ``incumbent``, or True for ``stop``, would fail only then."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InputError(f"{name}={function!r:.60} is not legal; give a function, or None")


def check_numbers(
    *,
    overlap: float,
    objective: str,
    memory_weight: int,
    gap: float,
    time_limit: float,
    total_time_limit: float | None,
    work_limit: float | None,
    seed: int,
    workers: int,
) -> None:
    if not _is_number(overlap) or not 0 <= overlap <= 1:
        raise InputError(f"overlap {overlap!r} is not legal; it is the hidden part of parameter gathers and gradient reductions, 0 to 1")
    if objective not in ("time", "memory"):
        raise InputError(f"objective {objective!r} is not known; legal: time, memory")
    if not _is_number(memory_weight, whole=True) or not 0 <= memory_weight <= MAX_MEMORY_WEIGHT:
        raise InputError(
            f"memory weight {memory_weight!r} is not legal; it is a whole number of nanoseconds per MiB of peak, 0 to {MAX_MEMORY_WEIGHT}"
        )
    if memory_weight and objective == "memory":
        raise InputError("a memory weight only makes sense with the time objective; drop it, or use objective time")
    if not _is_number(gap) or not 0 <= gap < 1:
        raise InputError(f"gap {gap!r} is not legal; it is a part of the objective, at least 0 and less than 1, as in 0.01")
    if not _is_number(time_limit) or not 0 < time_limit < math.inf:
        raise InputError(f"time limit {time_limit!r} is not legal; give seconds, more than 0")
    if total_time_limit is not None and not (_is_number(total_time_limit) and 0 < total_time_limit < math.inf):
        raise InputError(f"total time limit {total_time_limit!r} is not legal; give seconds, more than 0")
    if work_limit is not None and not (_is_number(work_limit) and 0 < work_limit < math.inf):
        raise InputError(f"work limit {work_limit!r} is not legal; give a number of work units, more than 0")
    if not _is_number(seed, whole=True) or not 0 <= seed < 2**31:
        raise InputError(f"seed {seed!r} is not legal; give a whole number, 0 to {2**31 - 1}")
    if not _is_number(workers, whole=True) or not 1 <= workers <= MAX_WORKERS:
        raise InputError(f"{workers!r} workers are not legal; give a whole number of processor cores, 1 to {MAX_WORKERS}")


def check_search(
    options: Options,
    *,
    time_limit: float,
    workers: int,
    work_limit: float | None = None,
    gap: float | None = None,
    seed: int | None = None,
) -> None:
    """Check how long and how exactly is searched anew on a plan's graph, before the model is traced for it; None is the plan's own."""
    check_numbers(
        overlap=options.overlap,
        objective=options.objective,
        memory_weight=options.memory_weight,
        gap=options.gap if gap is None else gap,
        time_limit=time_limit,
        total_time_limit=None,
        work_limit=work_limit,
        seed=options.seed if seed is None else seed,
        workers=workers,
    )


def _is_number(value: object, *, whole: bool = False) -> bool:
    """Whether this is a number of Python or numpy; truth values are not."""
    return isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
