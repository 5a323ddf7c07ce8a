"""A plan as a real distributed program: parameters are DTensors in the planned layouts, a step runs the planned graph on local shards.

Run under ``torchrun --nproc-per-node 8``, every process with the same model, inputs and seed:

>>> mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
>>> sharded = solver_shard.apply(model, solver_shard.load_plan("plan.json"), mesh)
>>> optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
>>> loss = sharded(input_ids=ids, labels=ids)       # called like the model; returns the loss
>>> loss.backward()                                 # sharded.get_parameter("up.weight").grad is a DTensor
>>> optimizer.step()

**What runs** is the plan's graph, forward and backward, op by op on local tensors, with the plan's collectives and no others.
``recorded_collectives`` has what ran. Nothing is left to DTensor's own propagation but what the optimizer does.

**Inputs** are whole tensors, the same in every process (each takes its part), or DTensors. They have the sizes that the plan was made for.

**The result** is the loss, or with a forward-only plan what the model returns: the tensor, a tuple, or a mapping by name. A tensor that
the plan hands over replicated is a plain one, any other a DTensor in its planned layout.

**Microbatches.** Of a plan with N of them, N calls and backwards make a step; the N-th backward leaves the gradients. As always, what
each backward starts from is yours: ``(loss / N).backward()`` for the mean.

**Meta models.** Parameters of a model on the meta device are made without values: load a checkpoint, or initialise them. Calling the
model before is an error.

**torch.compile** of the applied model runs it as it is, uncompiled and with the same numbers: the planned graph is not traced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from solver_shard.costs.layouts import free_move
from solver_shard.errors import InputError
from solver_shard.export.exchange import Move
from solver_shard.export.given import Given
from solver_shard.export.interpret import DTYPES
from solver_shard.export.loading import agree, check_cuts, check_mesh, check_torch, common_seed, retrace
from solver_shard.export.processes import Processes, Recorded
from solver_shard.export.random import numbers
from solver_shard.export.runtime import Compiled, State, compile_step, moves_of
from solver_shard.export.shards import Box, boxes, local_move
from solver_shard.layout import Layout
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role


def apply(
    model: nn.Module, plan: Plan, device_mesh: DeviceMesh, *, inputs: Any = None, loss_fn: Callable[..., torch.Tensor] | None = None
) -> nn.Module:
    """The model as a module whose parameters are DTensors and whose step is the planned one.

    All processes of the mesh call it alike. The model itself is left as it was, and can be deleted afterwards.

    Args:
        model: what the plan was made for, with values (the same in every process) or on the meta device.
        device_mesh: with the names and sizes of the plan's axes.
        inputs: example inputs, where the plan's are no plain keyword arguments or some argument is no tensor; as in ``trace``.
        loss_fn: what the plan was made with, where the model does not return its loss.

    Raises:
        InputError: the torch version, process group, mesh or model is not what the plan needs; the message says what is.
        TraceError: the model cannot be traced.
    """
    check_torch()
    if not isinstance(plan, Plan):
        raise InputError(f"a plan of type {type(plan).__name__} was given; give a Plan, as solver_shard.load_plan(FILE) returns")
    if not isinstance(model, nn.Module):
        raise InputError(f"a model of type {type(model).__name__} was given; give the torch.nn.Module that the plan was made for")
    refined = check_mesh(plan, device_mesh)
    check_cuts(plan, refined)
    traced = retrace(model, plan, inputs, loss_fn)
    agree(traced.values, refined, plan.mesh)
    processes = Processes(plan.mesh, refined)
    step = compile_step(plan, traced.program, device=processes.device, communicator=processes, place=torch.device(refined.device_type))
    given = Given(model, plan, refined, processes.device, inputs)
    sharded = Sharded(model, step, processes, given, traced.values)
    if numbers(traced.program):
        reseed(sharded, common_seed(refined, plan.mesh))
    return sharded


def recorded_collectives(sharded: nn.Module, *, reset: bool = False) -> list[Recorded]:
    """The collectives that have run in this process since it was applied, or since the last reset.

    Args:
        reset: forget them.

    Raises:
        InputError: the module is not an applied one.
    """
    runtime = runtime_of(sharded)
    found = list(runtime.processes.recorded())
    if reset:
        runtime.processes.reset()
    return found


def runtime_of(sharded: nn.Module) -> Runtime:
    """What runs an applied module; InputError for any other module."""
    if not isinstance(sharded, Sharded):
        raise InputError(f"a {type(sharded).__name__} was given; give what solver_shard.apply returned")
    return sharded._runtime


def reseed(sharded: nn.Module, seed: int) -> None:
    """Seed the random ops of an applied model, in all its processes alike.

    The next forward pass draws what the unsharded model draws under ``solver_shard.export.random.Unsharded(seed)``, the k-th after it
    what it draws with ``step=k``. Until it is called, the seed is the largest of the processes' ``torch.initial_seed()``.
    """
    runtime = runtime_of(sharded)
    runtime.seed, runtime.steps = int(seed), 0


class Runtime:
    """One process's side of an applied plan.

    Attributes:
        stored: by position in the program, the DTensors and local tensors of parameters, buffers and constants.
        parameters: those with a gradient, by position.
        pending, count: gradients of the microbatches so far, by position of their parameter, and how many these are.
        seed, steps: of random ops; how many forward passes have run since it was set.
        loads: how often a state_dict was loaded.
    """

    def __init__(self, step: Compiled, processes: Processes, given: Given) -> None:
        self.step, self.processes, self.given = step, processes, given
        self.plan, self.program, self.mesh = step.plan, step.program, processes.device_mesh
        self.stored: dict[int, torch.Tensor] = {}
        self.empty: dict[str, torch.Tensor] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.pending: dict[int, torch.Tensor] = {}
        self.count = 0
        self.seed, self.steps = 0, 0
        self.loads = 0
        last = {r.tensor: r for r in self.plan.reshards if r.purpose == "optimizer"}
        self.reductions: dict[int, Move | None] = {}
        self.specs: dict[int, DTensorSpec] = {}
        for p, g in self.program.gradients.items():
            self.specs[p] = self.spec(self.program, g, last[g].layout, self.plan.options.reduce_dtype)
            if self.plan.options.microbatches > 1:
                self.reductions[p] = moves_of(self.plan, self.program, last[g], processes.device, processes)
        self.written = {t: self._written(t) for t in self.program.outputs if self.program.tensors[t].name.startswith("updated(")}

    def _written(self, t: int) -> tuple[int, Move | None]:
        """The stored tensor that an output is the new value of, and what brings it to its layout."""
        name = self.program.tensors[t].name.removeprefix("updated(").removesuffix(")")
        stored = self.program.written(t)
        if not stored:
            raise InputError(f"the model writes into its input {name!r} in place, which an applied plan does not; write into a clone of it")
        made, wanted = self.plan.reshards[self.step.order.outputs[t][1]].layout, self.plan.tensors[stored[0]].layout
        shape, device = self.program.tensors[t].shape, self.processes.device
        if not free_move(made, wanted):
            raise InputError(
                f"the plan makes the new value of {name!r} as {made} and keeps {name!r} as {wanted}, without a collective between the two; "
                "make the plan anew with this version"
            )
        return stored[0], local_move(made, wanted, shape, self.plan.mesh, device)

    def spec(self, program: Program, t: int, layout: Layout, dtype: str | None = None) -> DTensorSpec:
        """How DTensor says a layout of a tensor."""
        tensor = program.tensors[t]
        stride = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape)))
        meta = TensorMeta(torch.Size(tensor.shape), stride, DTYPES[dtype or tensor.dtype])
        return DTensorSpec(self.mesh, tuple(layout.to_dtensor(self.plan.mesh.shape)), tensor_meta=meta)

    def forward(self, inputs: Mapping[int, torch.Tensor]) -> State:
        """Run the forward pass, and write back the buffers that it has changed."""
        sources = dict(inputs)
        for t, tensor in self.stored.items():
            sources[t] = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        kept = {t: (sources[t], move) for t, move in self.written.values()}
        sources |= {t: tensor.clone() for t, (tensor, _) in kept.items()}  # the backward pass may read the old value
        state = self.step.forward(sources, seed=self.seed, step=self.steps)
        self.steps += 1
        for t, (buffer, move) in self.written.items():
            kept[buffer][0].copy_(state.outputs[t] if move is None else move(state.outputs[t]))
        return state

    def backward(self, state: State, tangent: torch.Tensor | None) -> dict[int, DTensor] | None:
        """Run the backward pass; the gradients by position of their parameter, None before the last microbatch."""
        found = self.step.backward(state, tangent)
        microbatches = self.plan.options.microbatches
        if microbatches > 1:
            if self.count:
                for p, part in found.items():
                    self.pending[p] = self.pending[p] + part
            else:
                self.pending = found
            self.count += 1
            if self.count < microbatches:
                return None
            moved = ((p, part, self.reductions[p]) for p, part in self.pending.items())
            found = {p: part if move is None else move(part) for p, part, move in moved}
            self.pending, self.count = {}, 0
        return {p: DTensor(part, self.specs[p], requires_grad=False) for p, part in found.items()}

    def handed(self, t: int, state: State) -> torch.Tensor:
        """An output: a plain tensor where every device has it whole, else a DTensor."""
        layout = self.plan.reshards[self.step.order.outputs[t][1]].layout
        local = state.outputs[t]
        if all(placement.is_replicate for placement in layout):
            return local.detach()  # an object of its own: autograd ties it to the step, which holds the other
        return DTensor(local, self.spec(self.program, t, layout), requires_grad=False)


class _Step(torch.autograd.Function):  # type: ignore[misc]  # torch is not checked
    """A training step: from the parameters to the loss, and back to their gradients."""

    @staticmethod
    def forward(ctx: Any, runtime: Runtime, inputs: Mapping[int, torch.Tensor], *_parameters: torch.Tensor) -> torch.Tensor:
        ctx.runtime, ctx.state = runtime, runtime.forward(inputs)
        return runtime.handed(runtime.program.outputs[0], ctx.state)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[Any, ...]:
        runtime = ctx.runtime
        local = tangent.full_tensor() if isinstance(tangent, DTensor) else tangent
        found = runtime.backward(ctx.state, local)
        return None, None, *(None if found is None else found[p] for p in runtime.parameters)


class Sharded(nn.Module):  # type: ignore[misc]  # torch is not checked
    """An applied model; see ``apply``. Parameters and buffers have the names that they have in the model."""

    def __init__(self, model: nn.Module, step: Compiled, processes: Processes, given: Given, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._runtime = Runtime(step, processes, given)
        self.training = self._traced_training = model.training
        made = self._distribute(values)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            _holder(self, name).register_parameter(name.rpartition(".")[2], made[id(parameter)])
        transient = _transient(model)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            _holder(self, name).register_buffer(name.rpartition(".")[2], made[id(buffer)], persistent=name not in transient)
        self.register_load_state_dict_post_hook(_loaded)

    def _distribute(self, values: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """This process's part of every stored tensor; the DTensors by the id of the model's own."""
        runtime = self._runtime
        plan, program, device = runtime.plan, runtime.program, runtime.processes.device
        made: dict[int, torch.Tensor] = {}
        for t in program.sources():
            tensor, layout = program.tensors[t], plan.tensors[t].layout
            if tensor.role is Role.INPUT:
                continue
            whole, box = values[tensor.name], boxes(layout, tensor.shape, plan.mesh)[device]
            local = torch.empty(box.length, dtype=whole.dtype, device=runtime.mesh.device_type)
            if whole.is_meta:
                runtime.empty[tensor.name] = local.fill_(_unset(local.dtype))
            else:
                local.copy_(whole.detach()[box.inside(Box((0,) * whole.ndim, tensor.shape))])
            self._check_layout(tensor.name, tuple(tensor.shape), layout, box.length)
            shared: torch.Tensor = DTensor(local, runtime.spec(program, t, layout), requires_grad=False)
            if tensor.role is Role.PARAMETER:
                shared = nn.Parameter(shared, requires_grad=whole.requires_grad)
                if tensor.trainable and t in program.gradients:
                    runtime.parameters[t] = shared
                    shared.grad_dtype = runtime.specs[t].tensor_meta.dtype
            runtime.stored[t] = made[id(whole)] = shared
        return made

    def _check_layout(self, name: str, shape: tuple[int, ...], layout: Layout, length: tuple[int, ...]) -> None:
        """DTensor must cut a stored tensor as the plan does, for what saves and loads it goes by DTensor's cuts."""
        mesh = self._runtime.mesh
        found, _ = compute_local_shape_and_global_offset(shape, mesh, layout.to_dtensor(tuple(mesh.mesh.shape)))
        if tuple(found) != length:
            raise InputError(
                f"{name!r} {list(shape)} is planned as {layout}, which torch {torch.__version__} cuts into other parts than the plan: here "
                f"{tuple(found)}, not {length}; pin it to a plain layout, or plan with equal shards only (--conservative)"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the plan; see ``apply``.

        Raises:
            InputError: an input does not fit, the module is in another mode than it was planned in, or a value was never set.
        """
        return self._run(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self._runtime
        if self.training != self._traced_training:
            mode = {True: "training", False: "evaluation"}
            raise InputError(
                f"the plan is of a step in {mode[self._traced_training]} mode, the module is in {mode[self.training]} mode; call "
                f".{'train' if self._traced_training else 'eval'}(), or make a plan for the other mode"
            )
        if runtime.empty:
            self._check_values()
        inputs = runtime.given.bind(args, kwargs)
        if not runtime.plan.options.forward_only:
            return _Step.apply(runtime, inputs, *runtime.parameters.values())
        with torch.no_grad():
            state = runtime.forward(inputs)
        return _structured(
            {runtime.program.tensors[t].name: runtime.handed(t, state) for t in runtime.program.outputs if t not in runtime.written}
        )

    def _check_values(self) -> None:
        """What was on the meta device has been written since, or is not needed."""
        for name, local in self._runtime.empty.items():
            if local.numel() and local.dtype != torch.bool and _is_unset(local):
                raise InputError(
                    f"{name!r} has no values: the model was on the meta device; load a checkpoint into the applied model, or initialise "
                    "it, before calling it"
                )
        self._runtime.empty.clear()


def _loaded(module: Sharded, _keys: Any) -> None:
    module._runtime.loads += 1


def _unset(dtype: torch.dtype) -> float:
    """What stands where no value is yet."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(local: torch.Tensor) -> bool:
    unset = local.isnan() if local.dtype.is_floating_point or local.dtype.is_complex else local == _unset(local.dtype)
    return bool(unset.all())


def _structured(outputs: dict[str, torch.Tensor]) -> Any:
    """What a forward-only model returns: the tensor, a tuple, or a mapping by name."""
    if list(outputs) == ["output"]:
        return outputs["output"]
    plain = {name.removeprefix("output."): value for name, value in outputs.items()}
    return tuple(plain.values()) if all(name.isdigit() for name in plain) else plain


def _holder(module: nn.Module, name: str) -> nn.Module:
    """The module that holds a parameter, made where it is missing."""
    for part in name.split(".")[:-1]:
        if part not in module._modules:
            module._modules[part] = nn.Module()
        module = module._modules[part]
    return module


def _transient(model: nn.Module) -> set[str]:
    """Names of the buffers that are not in a state_dict."""
    return {f"{path}.{name}" if path else name for path, child in model.named_modules() for name in child._non_persistent_buffers_set}
