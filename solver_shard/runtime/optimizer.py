"""Optimizers of an applied plan: the state where the plan puts it, and clipping with the plan's one all-reduce.

>>> optimizer = ShardedOptimizer(sharded, torch.optim.AdamW, lr=1e-3)
>>> sharded(**inputs).backward()
>>> norm = clip_grad_norm_(sharded, 1.0)
>>> optimizer.step()

Any torch optimizer steps an applied model's parameters as they are, and this one need not be used. But a plan may lay the state of an
optimizer out apart from its parameter (ZeRO's first stages: whole parameters, cut states), or keep master weights in f32. Then each process
steps a *master*: its shard of the parameter in the state's layout, in f32 where the plan says so, with the gradient's slice of it; and
the new values go to the parameters by the collectives that the plan lists for the update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solver_shard.arguments import checked
from solver_shard.costs.layouts import free_move
from solver_shard.costs.memory import WAYS
from solver_shard.errors import InputError
from solver_shard.ops.run import DTYPES
from solver_shard.ops.shards import boxes, coordinates, local_move
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.runtime.apply import Runtime, runtime_of
from solver_shard.runtime.collectives import Communicator, Move
from solver_shard.runtime.step import moves_of


def squares(part: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of the squares of what a tensor holds; of complex numbers, of their sizes."""
    return (torch.view_as_real(part) if part.is_complex() else part).to(dtype).square().sum()


_CPU = torch.device("cpu")
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """What is stepped for a parameter.

    Attributes:
        shard: in the state's layout and dtype; the parameter itself where it is stored so.
        copy: from the parameter to the local shard, where that has bytes of its own; None where it lies in the parameter.
        wide: whether it has more precision than the parameter, so that it must be saved with the state.
        place: where in the gradient the part lies that the state reads.
        update: from the new values to the parameter's layout; None where they are in place.
    """

    name: str
    parameter: nn.Parameter
    shard: nn.Parameter
    copy: Callable[[], torch.Tensor] | None
    wide: bool
    place: tuple[slice, ...]
    update: Move | None

    @property
    def apart(self) -> bool:
        return self.shard is not self.parameter


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not checked
    """A torch optimizer on the states that a plan lays out.

    Schedulers take it as any optimizer. ``state_dict`` is keyed by parameter name and has the masters, so that a
    ``torch.distributed.checkpoint`` of it loads under another plan.

    >>> optimizer = ShardedOptimizer(sharded, torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP

    Args:
        sharded: what ``apply`` returned.
        kind: the optimizer's class, called as ``kind(parameters, **options)``; one that can step all parameters at once, fused or one after
            the other, does as the plan's optimizer says, unless the options do.
        params: parameters or groups of them, as torch's optimizers take them; default all trained ones.

    Raises:
        InputError: the module is not an applied one, or a parameter is not its own.
    """

    def __init__(
        self, sharded: nn.Module, kind: Callable[..., torch.optim.Optimizer], *, params: Iterable[Any] | None = None, **options: Any
    ) -> None:
        runtime = self._runtime = runtime_of(sharded)
        names = {id(p): name for name, p in sharded.named_parameters()}
        self._masters = {id(p): _master(runtime, t, p, names[id(p)]) for t, p in runtime.parameters.items()}
        wanted = list(runtime.parameters.values() if params is None else params)
        groups = [dict(group) for group in wanted] if wanted and isinstance(wanted[0], Mapping) else [{"params": wanted}]
        for group in groups:
            given = group["params"]
            group["params"] = [self._of(p) for p in ([given] if isinstance(given, torch.Tensor) else given)]
        self._inner = kind(groups, **{**_way(runtime.plan.options.optimizer, kind, options), **options})
        super().__init__(groups, self._inner.defaults)
        self._loads = -1
        self._share()

    def _of(self, parameter: torch.Tensor) -> nn.Parameter:
        found = self._masters.get(id(parameter))
        if found is None:
            raise InputError("a parameter was given that the applied model does not train; give those of sharded.parameters()")
        return found.shard

    def _share(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _refresh(self) -> None:
        """Masters with bytes of their own follow their parameters, where these were set since: before the first step, and after a load."""
        if self._loads == self._runtime.loads:
            return
        self._loads = self._runtime.loads
        with torch.no_grad():
            for master in self._masters.values():
                if master.copy is not None:
                    master.shard._local_tensor.copy_(master.copy())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters, and bring the new values to the parameters.

        Raises:
            InputError: some of the step's microbatches have not run.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._runtime.gradients
        if gradients.count:
            raise InputError(
                f"{gradients.count} of the step's {gradients.microbatches} microbatches have run backward; run all of them before the "
                "optimizer steps"
            )
        self._refresh()
        stepped = [master for master in self._masters.values() if master.apart and master.parameter.grad is not None]
        with torch.no_grad():
            for master in stepped:
                part = master.parameter.grad._local_tensor[master.place]
                master.shard.grad = DTensor(part.to(master.shard.dtype), master.shard._spec, requires_grad=False)
            self._inner.step()
            for master in stepped:
                master.shard.grad = None
            for master in stepped:
                new = master.shard._local_tensor.to(master.parameter.dtype)
                master.parameter._local_tensor.copy_(new if master.update is None else master.update(new))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters."""
        for master in self._masters.values():
            gradient = master.parameter.grad
            if set_to_none or gradient is None:
                master.parameter.grad = None
            else:
                gradient.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """States and f32 masters by parameter name, and the options of the groups. States that do not exist yet are made, of zeros."""
        self._refresh()
        self._initialise()
        names = {id(master.shard): master.name for master in self._masters.values()}
        state = {names[id(p)]: dict(found) for p, found in self._inner.state.items()}
        for master in self._masters.values():
            if master.wide:
                state.setdefault(master.name, {})["master"] = master.shard.detach()
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in self._inner.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned, in the layouts of this plan; load the model first.

        Raises:
            InputError: it has states of parameters that the model does not train.
        """
        self._refresh()
        of = {master.name: master for master in self._masters.values()}
        position = {id(p): i for i, p in enumerate(p for group in self._inner.param_groups for p in group["params"])}
        state: dict[int, Any] = {}
        for name, found in state_dict["state"].items():
            if name not in of:
                raise InputError(f"the optimizer state has {name!r}, which the applied model does not train")
            master = of[name]
            if master.wide and "master" in found:
                with torch.no_grad():
                    master.shard.copy_(found["master"])
            state[position[id(master.shard)]] = {k: v for k, v in found.items() if k != "master"}
        groups, start = [], 0
        for group in state_dict["param_groups"]:
            stop = start + len(group["params"])
            groups.append({**group, "params": [position[id(of[name].shard)] for name in group["params"]]})
            start = stop
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        self._share()

    def _initialise(self) -> None:
        """States of zeros, by a step of no length, as torch's own checkpointing makes them."""
        if self._inner.state:
            return
        kept = [(group, group["lr"]) for group in self._inner.param_groups if "lr" in group]
        own = [(p, p.grad) for group in self._inner.param_groups for p in group["params"]]
        for p, _ in own:
            p.grad = torch.zeros_like(p)
        for group, rate in kept:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        self._inner.step()
        for group, rate in kept:
            group["lr"] = rate
        for p, gradient in own:
            p.grad = gradient


def _way(optimizer: str, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> Mapping[str, bool]:
    """The arguments that make an optimizer step as the plan counts it; none where it has no such ways, or is told another."""
    ways = WAYS.get(optimizer, {})
    told = any(options.get(name) is not None for name in ("foreach", "fused", "differentiable"))
    return ways if not told and ways.keys() <= inspect.signature(kind).parameters.keys() else {}


def _master(runtime: Runtime, t: int, parameter: nn.Parameter, name: str) -> _Master:
    plan, program, device = runtime.plan, runtime.program, runtime.processes.device
    planned = plan.tensors[t]
    wide = plan.options.master_weights and parameter.dtype in _HALVES
    if planned.state is None or (planned.state == planned.layout and not wide):
        return _Master(name=name, parameter=parameter, shard=parameter, copy=None, wide=False, place=(), update=None)
    update = next(r for r in plan.reshards if r.purpose == "update" and r.tensor == t)
    reduced = next(r for r in plan.reshards if r.purpose == "optimizer" and r.tensor == program.gradients[t])
    dtype = "f32" if wide else planned.dtype
    spec = runtime.spec(program, t, planned.state, dtype)
    stored, wanted, given = (boxes(x, planned.shape, plan.mesh)[device] for x in (planned.layout, planned.state, reduced.layout))
    place = wanted.inside(stored) if free_move(planned.layout, planned.state) else None

    def copied() -> torch.Tensor:
        if place is not None:
            found = parameter._local_tensor[place]
        else:
            found = parameter.detach().redistribute(runtime.mesh, spec.placements)._local_tensor
        return found.to(DTYPES[dtype])

    apart = wide or place is None
    with torch.no_grad():
        local = copied().clone() if apart else parameter._local_tensor[place]
    return _Master(
        name=name,
        parameter=parameter,
        shard=nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=True),
        copy=copied if apart else None,
        wide=wide,
        place=wanted.inside(given),
        update=moves_of(plan, program, update, device, runtime.processes),
    )


@checked
def clip_grad_norm_(sharded: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``; the norm before.

    One all-reduce of one number, over the axes that the plan says. ``torch.nn.utils.clip_grad_norm_(sharded.parameters(), ...)`` gives
    the same, by whatever collectives DTensor takes for it.

    >>> norm = clip_grad_norm_(sharded, 1.0)  # doctest: +SKIP

    Args:
        sharded: what ``apply`` returned, of a plan that was made with ``clip=True``.
        max_norm: of all gradients together, in the 2-norm.

    Returns:
        The norm before, a tensor of no dims, the same in every process.

    Raises:
        InputError: the plan was made without clipping.
    """
    runtime = runtime_of(sharded)
    plan, program, device = runtime.plan, runtime.program, runtime.processes.device
    if not plan.options.clip:
        raise InputError(
            "the plan was made without clipping; plan it with clip=True (--clip), or call torch.nn.utils.clip_grad_norm_ on the parameters"
        )
    local = {t: p.grad._local_tensor for t, p in runtime.parameters.items() if p.grad is not None}
    norm = norm_of(local, plan, program, device, runtime.processes, torch.device(runtime.mesh.device_type))
    scale = clipping_scale(norm, max_norm)
    for gradient in local.values():
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def norm_of(
    gradients: Mapping[int, torch.Tensor], plan: Plan, program: Program, device: int, communicator: Communicator, place: torch.device = _CPU
) -> torch.Tensor:
    """The norm of all gradients of a step together, by one all-reduce of one number.

    Args:
        gradients: local ones by position of their parameter, in the layouts that their reductions leave them in.
        place: where they are.
    """
    mesh, axes = plan.mesh, () if plan.clip is None else plan.clip.axes
    summed = [mesh.index(name) for name in axes]
    at = coordinates(mesh)[device]
    reduced = {r.tensor: r.layout for r in plan.reshards if r.purpose == "optimizer"}
    total = torch.zeros((), dtype=torch.float32, device=place)
    for t, gradient in gradients.items():
        planned = plan.tensors[t]
        state = planned.state or planned.layout
        if any(at[axis] for axis in summed if not state[axis].is_shard):
            continue  # what several devices of a group hold counts once
        move = local_move(reduced[program.gradients[t]], state, planned.shape, mesh, device)
        total = total + squares(gradient if move is None else move(gradient))
    if axes:
        total = communicator.all_reduce(axes, "sum")(total)
    return total.sqrt()


def clipping_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of this norm are multiplied, so that it is at most ``max_norm``; as torch's own clipping does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
