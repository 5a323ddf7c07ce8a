"""A plan as a real distributed program: parameters are DTensors in the planned layouts, a step runs the planned graph on local shards.

:func:`apply` says how a program uses it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from solver_shard.arguments import checked
from solver_shard.costs.layouts import free_move
from solver_shard.errors import InputError, SolverShardError
from solver_shard.graph.pins import parse_pin, resolve_pins
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.random import numbers
from solver_shard.ops.run import DTYPES
from solver_shard.ops.shards import Box, boxes, local_move, plain
from solver_shard.plan.evaluate import evaluated
from solver_shard.plan.io import load_plan
from solver_shard.plan.plan import Plan, PlannedTensor
from solver_shard.program import Program, Role, Tensor, constrain, in_place
from solver_shard.runtime.collectives import Move, Processes, Recorded
from solver_shard.runtime.step import Compiled, GradientSum, StepState, compile_step
from solver_shard.tracing.clean import clean
from solver_shard.tracing.torch import argument_names, trace, trace_raw


@checked
def apply(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    device_mesh: DeviceMesh,
    *,
    inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> nn.Module:
    """The model as a module whose parameters are DTensors and whose step is the planned one.

    Run under ``torchrun --nproc-per-node 8``, every process with the same model, inputs and seed:

    >>> mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    >>> sharded = solver_shard.apply(model, solver_shard.load_plan("plan.json"), mesh)
    >>> optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    >>> loss = sharded(input_ids=ids, labels=ids)       # called like the model; returns the loss
    >>> loss.backward()                                 # sharded.get_parameter("up.weight").grad is a DTensor
    >>> optimizer.step()

    All processes of the mesh call it alike. The model itself is left as it was, and can be deleted afterwards.

    **What runs** is the plan's graph, forward and backward, op by op on local tensors, with the plan's collectives and no others.
    ``recorded_collectives`` has what ran. Nothing is left to DTensor's own propagation but what the optimizer does.

    **Inputs** are whole tensors, the same in every process (each takes its part), or DTensors. They have the sizes that the plan was made
    for. An input that the model writes into in place (a cache) is a DTensor in its planned layout, or a plain tensor where the plan keeps
    it whole, and is written into.

    **The result** is the loss, or with a forward-only plan what the model returns: the tensor, a tuple, or a mapping by name. A tensor that
    the plan hands over replicated is a plain one, any other a DTensor in its planned layout.

    **Microbatches.** Of a plan with N of them, N calls and backwards make a step; the N-th backward leaves the gradients. As always, what
    each backward starts from is yours: ``(loss / N).backward()`` for the mean.

    **Meta models.** Parameters of a model on the meta device are made without values: load a checkpoint, or initialise them. Calling the
    model before is an error.

    **torch.compile** of the applied model runs it as it is, uncompiled and with the same numbers: the planned graph is not traced again.

    Args:
        model: what the plan was made for, with values (the same in every process) or on the meta device.
        plan: what ``optimize`` returned, or its file.
        device_mesh: with the names and sizes of the plan's axes.
        inputs: example inputs, where the plan's are no plain keyword arguments or some argument is no tensor; as in ``trace``.
        loss_fn: what the plan was made with, where the model does not return its loss.

    Returns:
        A module that is called like the model, whose parameters and gradients are DTensors in the plan's layouts.

    Raises:
        InputError: the torch version, process group, mesh or model is not what the plan needs; the message says what is.
        TraceError: the model cannot be traced.
    """
    check_torch()
    plan = load_plan(plan)
    refined = check_mesh(plan, device_mesh)
    check_cuts(plan, refined)
    traced = retrace(model, plan, inputs, loss_fn)
    agree(traced.values, refined, plan.mesh)
    processes = Processes(plan.mesh, refined)
    step = compile_step(plan, traced.program, device=processes.device, communicator=processes, place=torch.device(refined.device_type))
    given = StepInputs(model, plan, refined, processes.device, inputs)
    sharded = Sharded(model, step, processes, given, traced.values)
    if numbers(traced.program):
        reseed(sharded, common_seed(refined, plan.mesh))
    return sharded


@checked
def recorded_collectives(sharded: nn.Module, *, reset: bool = False) -> list[Recorded]:
    """The collectives that have run in this process since it was applied, or since the last reset.

    >>> [(ran.kind, ran.axes, ran.nbytes) for ran in recorded_collectives(sharded)]  # doctest: +SKIP

    Args:
        sharded: what ``apply`` returned.
        reset: forget them.

    Returns:
        Kind, mesh axes and bytes of each, in the order in which they ran.

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

    The next forward pass draws what the unsharded model draws under ``solver_shard.ops.random.Unsharded(seed)``, the k-th after it
    what it draws with ``step=k``. Until it is called, the seed is the largest of the processes' ``torch.initial_seed()``.
    """
    runtime = runtime_of(sharded)
    runtime.seed, runtime.steps = int(seed), 0


class Runtime:
    """One process's side of an applied plan.

    Attributes:
        stored: by position in the program, the DTensors and local tensors of parameters, buffers and constants.
        parameters: those with a gradient, by position.
        gradients: of the microbatches so far.
        written: outputs that are the new value of a buffer or input: of which, and what brings it there.
        inside: tensors that ops write into.
        seed, steps: of random ops; how many forward passes have run since it was set.
        loads: how often a state_dict was loaded.
    """

    def __init__(self, step: Compiled, processes: Processes, given: StepInputs) -> None:
        self.step, self.processes, self.given = step, processes, given
        self.plan, self.program, self.mesh = step.plan, step.program, processes.device_mesh
        self.stored: dict[int, torch.Tensor] = {}
        self.empty: dict[str, torch.Tensor] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.gradients = GradientSum(self.plan, self.program, processes.device, processes)
        self.seed, self.steps = 0, 0
        self.loads = 0
        last = {r.tensor: r for r in self.plan.reshards if r.purpose == "optimizer"}
        self.specs: dict[int, DTensorSpec] = {}
        for p, g in self.program.gradients.items():
            self.specs[p] = self.spec(self.program, g, last[g].layout, self.plan.options.reduce_dtype)
        self.written = {t: self._written(t) for t in self.program.outputs if self.program.written(t)}
        self.inside = {self.program.ops[i].operands[0] for i in in_place(self.program)}

    def _written(self, t: int) -> tuple[int, Move | None]:
        """The stored tensor that an output is the new value of, and what brings it to its layout."""
        name, stored = self.program.tensors[t].name.removeprefix("updated(").removesuffix(")"), self.program.written(t)
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

    def forward(self, inputs: Mapping[int, torch.Tensor]) -> StepState:
        """Run the forward pass, and write back the buffers and inputs that it has changed and that it has not written into."""
        sources = dict(inputs)
        for t, tensor in self.stored.items():
            sources[t] = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        kept = {t: sources[t] for t, _ in self.written.values()}
        sources |= {t: tensor.clone() for t, tensor in kept.items() if t not in self.inside}  # the backward pass may read the old value
        state = self.step.forward(sources, seed=self.seed, step=self.steps)
        self.steps += 1
        for t, (stored, move) in self.written.items():
            made = state.outputs[t] if move is None else move(state.outputs[t])
            if not made.is_set_to(kept[stored]):
                kept[stored].copy_(made)
        return state

    def backward(self, state: StepState, tangent: torch.Tensor | None) -> dict[int, DTensor] | None:
        """Run the backward pass; the gradients by position of their parameter, None before the last microbatch."""
        gradients = self.gradients.take(self.step.backward(state, tangent, self.gradients.sums), state)
        if gradients is None:
            return None
        first = {id(part): p for p, part in reversed(gradients.items())}  # gradients may be scaled in place, so each parameter has its own
        own = {p: part if first[id(part)] == p else part.clone() for p, part in gradients.items()}
        return {p: DTensor(part, self.specs[p], requires_grad=False) for p, part in own.items()}

    def handed(self, t: int, state: StepState) -> torch.Tensor:
        """An output: a plain tensor where every device has it whole, else a DTensor."""
        layout = self.plan.reshards[self.step.order.outputs[t][1]].layout
        local = state.outputs[t]
        if all(placement.is_replicate for placement in layout):
            return local.detach()  # an object of its own: autograd ties it to the step, which holds the other
        return DTensor(local, self.spec(self.program, t, layout), requires_grad=False)


class _StepFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is not checked
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

    def __init__(
        self, model: nn.Module, step: Compiled, processes: Processes, given: StepInputs, values: Mapping[str, torch.Tensor]
    ) -> None:
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
            return _StepFunction.apply(runtime, inputs, *runtime.parameters.values())
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


TESTED = ((2, 13), (2, 14))
"""First torch version that plans were run with, and the first one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """A model that a plan fits.

    Attributes:
        values: the model's own tensors by name: parameters and buffers (under every name they have), and constants.
    """

    program: Program
    values: Mapping[str, torch.Tensor]


def check_torch() -> None:
    """InputError where the installed torch is not one that plans were run with."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = tuple(map(int, found.groups())) if found else (0, 0)
    if not TESTED[0] <= version < TESTED[1]:
        low, high = (".".join(map(str, v)) for v in TESTED)
        raise InputError(
            f"torch {torch.__version__} is installed; plans run with torch >= {low}, < {high}, whose tracing and DTensor they were tested "
            f"with: pip install 'torch>={low},<{high}'"
        )


def check_mesh(plan: Plan, device_mesh: DeviceMesh) -> DeviceMesh:
    """The device mesh with the axes of the plan's mesh, sub-axes included.

    Where the plan has neighbouring axes of the device mesh as one, ``d_e`` for d and e, so has the mesh that is returned.

    Raises:
        InputError: there is no process group, or the mesh has other axes or this process no place in it.
    """
    whole = plan.mesh.whole
    made = f"init_device_mesh(device_type, {whole.shape}, mesh_dim_names={whole.names})"
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"the plan is for {whole.size} devices ({whole}), but this process has no process group; start {whole.size} processes "
            f"(torchrun --nproc-per-node ...), call torch.distributed.init_process_group(), and give {made}"
        )
    if not isinstance(device_mesh, DeviceMesh):
        raise InputError(f"a device mesh of type {type(device_mesh).__name__} was given; give {made}")
    names, shape = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    if names is None:
        raise InputError(f"the device mesh {shape} has no names for its axes, and the plan is for {whole}; give {made}")
    own = ((whole.names, whole.shape), (plan.mesh.names, plan.mesh.shape))
    if (tuple(names), shape) not in own and not whole.joins(names, shape):
        given = ",".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        raise InputError(f"the device mesh is {given}, the plan is for {whole}; give {made}, or make a plan for {given}")
    if device_mesh.get_coordinate() is None:
        raise InputError(f"process {dist.get_rank()} has no place in the device mesh {whole}; call apply in the processes of the mesh only")
    if shape == plan.mesh.shape:
        return device_mesh
    return DeviceMesh(device_mesh.device_type, device_mesh.mesh.view(plan.mesh.shape), mesh_dim_names=plan.mesh.names)


def check_cuts(plan: Plan, device_mesh: DeviceMesh) -> None:
    """What is kept as DTensors must be what DTensor puts together rightly.

    Once a mesh knows a flattened axis, DTensor (torch 2.13) gathers over it at once what several axes cut, as if it lay in even chunks:
    steps of torch's optimizers, ``full_tensor`` and checkpoints would silently hold wrong rows where it does not.

    Raises:
        InputError: the device mesh has a flattened axis, and several axes of the plan cut a dim unevenly.
    """
    flattened = list(device_mesh._get_root_mesh()._flatten_mapping)
    if not flattened:
        return
    stored = [t for t in plan.tensors if t.role in ("parameter", "buffer")]
    held = [(t.name, t.shape, layout) for t in stored for layout in (t.layout, t.state) if layout is not None]
    held += [(plan.tensors[r.tensor].name, plan.tensors[r.tensor].shape, r.layout) for r in plan.reshards if r.purpose == "optimizer"]
    for name, shape, layout in held:
        for dim, size in enumerate(shape):
            axes = layout.order(dim)
            parts = math.prod(plan.mesh.shape[axis] for axis in axes)
            if len(axes) > 1 and size % parts:
                raise InputError(
                    f"the device mesh has the flattened axis {flattened[0]!r}, over which torch {torch.__version__} puts the {parts} "
                    f"uneven parts of {name!r} {list(shape)}, {layout}, together wrongly; give a mesh of its own (init_device_mesh, "
                    "nothing flattened), or plan with equal shards only (--conservative)"
                )


def retrace(model: nn.Module, plan: Plan, inputs: Any, loss_fn: Callable[..., Any] | None) -> FittedModel:
    """Trace the model as the plan's was, and hold one against the other.

    >>> traced = retrace(model, plan, None, None)
    >>> traced.program.tensors[0].name, traced.values["up.weight"].shape
    ('up.weight', torch.Size([12, 8]))

    A plan holds no code, so the ops come from the model, and must be those that the plan names: the first difference is an error.

    Args:
        inputs: example inputs; None to make them from the plan's, as keyword arguments.

    Raises:
        InputError: the model's step is not the plan's, or cannot run as the plan says; the message names the first difference.
        TraceError: the model cannot be traced.
    """
    if inputs is None:
        inputs = _inputs(plan)
    raw = trace_raw(model, inputs, name=plan.name, loss_fn=loss_fn, forward_only=plan.options.forward_only)
    program = fitting(plan, clean(raw), lambda: in_the_other_mode(plan, model, inputs, loss_fn))
    evaluated(plan, program)
    own: dict[str, torch.Tensor] = dict(raw.constants)
    own |= dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    for t in program.sources():
        tensor = program.tensors[t]
        if tensor.role is Role.BUFFER and tensor.name not in own:
            own[tensor.name] = _attribute(model, tensor.name)
    return FittedModel(program=program, values=own)


def fitting(plan: Plan, program: Program, advice: Callable[[], str | None] = lambda: None) -> Program:
    """A traced program with places for the plan's pins; InputError where it is not the plan's: the message names the first difference.

    ``advice`` is asked for what to do about it, where there is one.
    """
    program = _placed(plan, program)
    found = difference(plan, program)
    if found is not None:
        other = "Give the same model, in the same mode (train or eval) and with the same loss_fn and inputs, or make a plan for this one"
        raise InputError(f"the model's step is not the one that the plan was made for: {found}. {advice() or other}")
    return program


def _placed(plan: Plan, program: Program) -> Program:
    pins = [parse_pin(text, plan.mesh) for text in plan.options.pins]
    return constrain(program, resolve_pins(pins, program, plan.mesh), plan.relays)[0]


def in_the_other_mode(plan: Plan, model: nn.Module, inputs: Any, loss_fn: Callable[..., Any] | None) -> str | None:
    """What to do where a model's step is not the plan's, but would be in the other mode; None where it would not. The model stays as it is.

    Modes change which ops there are (dropout, batch norm, attention), so a difference between ops hardly tells of them.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(not modes[0][1])
        program = trace(model, inputs, name=plan.name, loss_fn=loss_fn, forward_only=plan.options.forward_only)
        if difference(plan, _placed(plan, program)) is not None:
            return None
    except SolverShardError:
        return None
    finally:
        for module, training in modes:
            module.training = training
    mode, call = ("training", "eval()") if modes[0][1] else ("evaluation", "train()")
    return f"The model is in {mode} mode, and in the other its step is the plan's: call model.{call} first, or make a plan for this mode"


def difference(plan: Plan, program: Program) -> str | None:
    """The first thing in which a program is not the plan's, for a person to read; None where there is none."""
    ours = {t.name: _tensor(t) for t in plan.tensors if t.role in _GIVEN}
    theirs = {t.name: _tensor(t) for t in program.tensors if t.role.value in _GIVEN}
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            return f"the plan has {ours.get(name, f'no {name!r}')}, the model {theirs.get(name, f'no {name!r}')}"
    for i, (op, other) in enumerate(zip(plan.ops, program.ops, strict=False)):
        said = f"op {i} of the plan is {op.name} in {op.module or 'the model'} ({op.phase})"
        if (op.name, op.module, op.phase, op.recompute) != (other.name, other.module, other.phase.value, other.recompute):
            return f"{said}, the model's is {other.name} in {other.module or 'the model'} ({other.phase.value})"
        if (op.operands, op.results) != (other.operands, other.results):
            return f"{said}, and reads and makes {op.operands} → {op.results}, the model's {other.operands} → {other.results}"
    for one, two in zip(plan.tensors, program.tensors, strict=False):
        if _tensor(one) != _tensor(two):
            return f"the plan has {_tensor(one)}, the model {_tensor(two)}"
    for what, a, b in (("ops", plan.ops, program.ops), ("tensors", plan.tensors, program.tensors)):
        if len(a) != len(b):
            return f"the plan has {len(a)} {what}, the model {len(b)}"
    gradients = {program.tensors[p].name: g for p, g in program.gradients.items()}
    if dict(plan.gradients) != gradients or plan.outputs != program.outputs:
        return "the two return different tensors"
    return None


_GIVEN = ("parameter", "buffer", "input")
"""Roles of tensors that have a name of the model's own."""


def _tensor(tensor: PlannedTensor | Tensor) -> str:
    role = tensor.role.value if isinstance(tensor.role, Role) else tensor.role
    trained = "trained " if tensor.trainable else "frozen " if role == "parameter" else ""
    return f"{trained}{role} {tensor.name!r} {tensor.dtype}{list(tensor.shape)}"


def _inputs(plan: Plan) -> dict[str, torch.Tensor]:
    """Keyword arguments with the shapes of the plan's inputs."""
    made = {}
    for tensor in plan.tensors:
        if tensor.role != "input":
            continue
        if "." in tensor.name or re.fullmatch(r"arg\d+", tensor.name):
            raise InputError(
                f"input {tensor.name!r} of the plan is no keyword argument of its own; give example inputs as they were traced: "
                "apply(model, plan, device_mesh, inputs=...)"
            )
        made[tensor.name] = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
    return made


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    """A tensor that a module holds as a plain attribute, or one whose value the trace does not have."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor):
        raise InputError(
            f"the value of {name!r}, a tensor that the model makes from values while it runs, is not known; register it as a buffer"
        )
    return found


def agree(values: Mapping[str, torch.Tensor], device_mesh: DeviceMesh, mesh: Mesh) -> None:
    """All processes of the mesh must have been given the same model.

    Raises:
        InputError: they differ in a tensor; the message names the first.
    """
    known = {name: value.detach() for name, value in values.items() if not value.is_meta and value.numel()}
    sums = [_sum(value) for value in known.values()]
    if not sums:
        return
    total = torch.stack([s.to(device_mesh.device_type) for s in sums])
    both = torch.cat([total, -total])
    for name in mesh.names:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=device_mesh.get_group(name))
    high, low = both[: len(sums)], -both[len(sums) :]
    wrong = (high != low).nonzero()
    if len(wrong):
        name = list(known)[int(wrong[0])]
        raise InputError(
            f"the processes of the mesh were given different values of {name!r}; seed them alike (torch.manual_seed) before building the "
            "model, or load one checkpoint in all of them"
        )


def _sum(value: torch.Tensor) -> torch.Tensor:
    """A number that two different tensors hardly share."""
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    wide = plain.double().nan_to_num()
    return wide.abs().sum() + wide.sum() / 3


def common_seed(device_mesh: DeviceMesh, mesh: Mesh) -> int:
    """The largest seed that torch's generator was given in a process of the mesh: theirs, where it is the same in all."""
    seed = torch.tensor(torch.initial_seed() % 2**63, dtype=torch.int64, device=device_mesh.device_type)
    for name in mesh.names:
        dist.all_reduce(seed, dist.ReduceOp.MAX, group=device_mesh.get_group(name))
    return int(seed)


class StepInputs:
    """What a step is called with, and the part of it that a device reads.

    >>> given = StepInputs(model, plan, device_mesh, device, None)
    >>> given.bind((), {"input_ids": ids, "labels": labels})
    {16: tensor(...), 17: tensor(...)}

    Plain tensors are whole: every process passes the same, and each takes its part. DTensors are taken as they are laid out where that
    is the plan's layout, and are redistributed where it is not.

    Args:
        model: whose forward says the names of positional arguments.
        example: the inputs that the model was traced with, where the caller gave some: what is no tensor in them is part of the graph.
    """

    def __init__(self, model: nn.Module, plan: Plan, device_mesh: DeviceMesh, device: int, example: Any) -> None:
        self.model, self.mesh, self.device_mesh = model, plan.mesh, device_mesh
        self.inputs: dict[str, tuple[int, PlannedTensor, tuple[slice, ...] | None]] = {}
        self.written = {t.name for t in plan.tensors if f"updated({t.name})" in {plan.tensors[o].name for o in plan.outputs}}
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

    def placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments with those that the step writes into as DTensors in their planned layouts, from whole tensors."""
        found = dict(inputs)
        for name, (_, tensor, place) in self.inputs.items():
            if tensor.name in self.written:
                whole = inputs[name]
                part = (whole if place is None else whole[place]).clone(memory_format=torch.contiguous_format)
                placements = tensor.layout.to_dtensor(self.mesh.shape)
                found[name] = DTensor.from_local(
                    part.to(self.device_mesh.device_type),
                    self.device_mesh,
                    placements,
                    run_check=False,
                    shape=whole.shape,
                    stride=torch.empty(whole.shape, device="meta").stride(),
                )
        return found

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
            same = tuple(value.placements) == placements
            part = (value if same else value.redistribute(self.device_mesh, placements)).to_local()
        else:
            same = place is None and value.device.type == self.device_mesh.device_type and not value.is_conj() and not value.is_neg()
            part = (plain(value) if place is None else plain(value[place]).contiguous()).to(self.device_mesh.device_type)
        if tensor.name in self.written and not same:
            form = tensor.layout.format(tensor.shape, tensor.dtype)
            raise InputError(
                f"the model writes into its input {name!r} in place, and the plan keeps it as {form}; give a DTensor of that layout, "
                "which is then written into (a plain tensor is taken where every device has the whole)"
            )
        return part


def _tuple(example: Any) -> tuple[Any, ...]:
    return (example,) if isinstance(example, torch.Tensor) else tuple(example)


def _with(name: str, fixed: Mapping[str, Any]) -> str:
    return f"with {name}={fixed[name]!r}" if name in fixed else "without it"
