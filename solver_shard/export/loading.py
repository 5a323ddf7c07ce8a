"""What a plan is held against before it runs: the installed torch, the device mesh, and the model, traced anew.

>>> traced = retrace(model, plan, None, None)
>>> traced.program.tensors[0].name, traced.values["up.weight"].shape
('up.weight', torch.Size([12, 8]))

A plan holds no code, so the ops come from the model, and must be those that the plan names: the first difference is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from solver_shard.constraints import constrain
from solver_shard.errors import InputError, SolverShardError
from solver_shard.export.interpret import DTYPES
from solver_shard.frontends.clean import clean
from solver_shard.frontends.torch import trace, trace_raw
from solver_shard.mesh import Mesh
from solver_shard.pins import parse_pin, resolve_pins
from solver_shard.plan.legal import evaluated
from solver_shard.plan.plan import Plan, PlannedTensor
from solver_shard.program import Program, Role, Tensor

TESTED = ((2, 13), (2, 14))
"""First torch version that plans were run with, and the first one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
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


def retrace(model: nn.Module, plan: Plan, inputs: Any, loss_fn: Callable[..., Any] | None) -> Traced:
    """Trace the model as the plan's was, and hold one against the other.

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
    return Traced(program=program, values=own)


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
