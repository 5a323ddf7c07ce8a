"""What is run to verify a plan: the plan itself where it is small, else a small twin that carries its decisions.

>>> case = prepare(plan, "llama3-8b")
>>> case.changes
('mesh dp=32,tp=8 -> dp=2,tp=2', 'num_hidden_layers 32 -> 1, one of each kind', 'hidden_size 4096 -> 64, ...', ...)

A twin is traced anew, so its plan is one of a graph of its own: each axis of the mesh is cut to 2 (or to what makes the number of
processes asked for), of a preset or config the layers to one of each kind and the widths and vocabulary to a scale
(:mod:`solver_shard.export.shrink`). The decisions of the plan are carried to it by names (:mod:`solver_shard.export.transfer`). In one
process it computes in 64-bit floats, in which there is no rounding to hide a mistake. A module of the user's own cannot be made smaller
here: its twin has the smaller mesh alone, unless the user gives a smaller model with the same names and asks for a twin.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from solver_shard.constraints import constrain
from solver_shard.errors import InputError
from solver_shard.export.loading import difference, in_the_other_mode
from solver_shard.export.subject import Subject, of_program, subject_of, widened
from solver_shard.export.transfer import transfer
from solver_shard.mesh import Axis, Mesh
from solver_shard.pins import parse_pin, resolve_pins
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.source import DEFAULT_DTYPE, is_entry_point

MAX_PROCESSES = 64
_MOST = 1 << 27
"""Elements of a parameter or an activation, and of all parameters together, of what is run."""
_SMALL_DEVICES, _SMALL_PARAMETERS, _SMALL_ELEMENTS = 8, 1 << 22, 1 << 26
_LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to run and the model with numbers that it is for; what of it is not as in the plan that was given."""

    plan: Plan
    subject: Subject
    changes: tuple[str, ...] = ()


def prepare(
    plan: Plan,
    model: str | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    processes: int | None = None,
    twin: bool | None = None,
    scale: str | float | Fraction | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Case:
    """What to run for a plan; arguments as of ``verify``.

    Raises:
        InputError: the model is not the plan's, or no twin can be made; the message says what can.
        TraceError: the model cannot be traced.
    """
    factor = _scale(scale)
    if processes is not None and not (isinstance(processes, int) and not isinstance(processes, bool) and 1 <= processes <= MAX_PROCESSES):
        raise InputError(f"{processes!r} processes were asked; give a whole number, 1 to {MAX_PROCESSES}")
    fits = processes is None or processes == plan.mesh.size
    if twin is False and not fits:
        raise InputError(
            f"the plan is for {plan.mesh.size} devices ({plan.mesh.whole}), {processes} processes were asked; give --processes "
            f"{plan.mesh.size}, or leave --no-twin out to carry the plan to a smaller mesh"
        )
    as_it_is = twin is False or (twin is None and fits and _is_small(plan))
    mesh = plan.mesh if as_it_is else twin_mesh(plan.mesh, processes)
    named = isinstance(model, str) and not is_entry_point(model)
    if as_it_is and scale is not None:
        raise InputError("a scale is for a twin, and this plan is run as it is; leave --scale out, or ask for --twin")
    if not named and factor is not None:
        raise InputError("a model of your own cannot be scaled; give a smaller one with the same names and --twin, and leave --scale out")
    say("tracing the model")
    if named and not as_it_is:
        subject, changes = _shrunk(plan, str(model), mesh, factor, seed)
    else:
        _check_size(plan)
        subject, changes = _given(plan, model, inputs, loss_fn, seed), []
        changes += [f"mesh {plan.mesh} -> {mesh}"] if mesh != plan.mesh else []
    planned = _relayed(plan, subject)
    found = difference(plan, planned.program)
    if as_it_is and found is not None:
        raise InputError(_other(plan, found, subject))
    if as_it_is:
        return Case(plan=plan, subject=planned)
    if not named and found is not None:
        if twin is None:
            raise InputError(f"{_other(plan, found, subject)}; or ask for --twin, to carry the plan to a smaller model with the same names")
        changes.append(f"the model given is another one: {found}")
    return _carried(plan, subject, mesh, changes, wide=processes is None, say=say)


def twin_mesh(mesh: Mesh, processes: int | None = None) -> Mesh:
    """The mesh with each axis cut to 2, or to what makes so many processes, the left axes small.

    >>> str(twin_mesh(Mesh.parse("dp=32,tp=8"))), str(twin_mesh(Mesh.parse("dp=32,tp=8"), 8))
    ('dp=2,tp=2', 'dp=2,tp=4')

    Raises:
        InputError: the axes cannot be cut to so many processes; the message says to how many they can.
    """
    least = [min(2, axis.size) for axis in mesh.axes]
    if processes is None:
        return _sized(mesh, least)
    options = [[n for n in range(low, axis.size + 1) if axis.size % n == 0 or n == low] for low, axis in zip(least, mesh.axes, strict=True)]
    options = [[n for n in sizes if n <= MAX_PROCESSES] for sizes in options]
    products = {math.prod(sizes): sizes for sizes in itertools.product(*(sorted(sizes, reverse=True) for sizes in options))}
    if processes not in products:
        legal = ", ".join(str(n) for n in sorted(products) if n <= MAX_PROCESSES)
        raise InputError(f"the mesh {mesh} cannot be cut to {processes} processes, each axis to a part of it; legal: {legal}")
    return _sized(mesh, products[processes])


def _sized(mesh: Mesh, sizes: Any) -> Mesh:
    return Mesh(axes=tuple(Axis(name=axis.name, size=size, parent=axis.parent) for axis, size in zip(mesh.axes, sizes, strict=True)))


def _scale(scale: str | float | Fraction | None) -> Fraction | None:
    if scale is None:
        return None
    try:
        found = Fraction(scale)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        found = Fraction(0)
    if not 0 < found <= 1:
        raise InputError(
            f"scale {scale!r} is not legal; it is a factor on widths and vocabulary, more than 0 and at most 1, as 0.05 or 1/64"
        )
    return found


def _is_small(plan: Plan) -> bool:
    """Whether a plan can be run as it is in seconds."""
    elements = [math.prod(tensor.shape) for tensor in plan.tensors]
    parameters = sum(n for n, tensor in zip(elements, plan.tensors, strict=True) if tensor.role == "parameter")
    return plan.mesh.size <= _SMALL_DEVICES and parameters <= _SMALL_PARAMETERS and sum(elements) <= _SMALL_ELEMENTS


def _check_size(plan: Plan) -> None:
    parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors if tensor.role == "parameter")
    largest = max(plan.tensors, key=lambda tensor: math.prod(tensor.shape))
    if parameters > _MOST or math.prod(largest.shape) > _MOST:
        raise InputError(
            f"the plan is of {parameters:,} parameters, its largest tensor {largest.name!r} has {math.prod(largest.shape):,} elements, "
            f"and at most {_MOST:,} are run here; verify a twin: presets and configs are made smaller by themselves (leave --no-twin out), "
            "of a model of your own make a plan with fewer layers and smaller sizes"
        )


def _other(plan: Plan, found: str, subject: Subject) -> str:
    """What to say of a model that is not the plan's."""
    mode = None if subject.model is None else in_the_other_mode(plan, subject.model, subject.inputs, subject.loss_fn)
    advice = "give the same model, loss and inputs" if mode is None else mode[0].lower() + mode[1:]
    return f"the model is not the one that the plan of {plan.name!r} was made for: {found}; {advice}"


def _given(plan: Plan, model: Any, inputs: Any, loss_fn: Callable[..., Any] | None, seed: int) -> Subject:
    """The model as the user gives it, with numbers."""
    options = plan.options
    if isinstance(model, Program):
        return of_program(model, microbatches=options.microbatches, seed=seed)
    labels = words = None
    name = plan.name
    if isinstance(model, str) and is_entry_point(model):
        from solver_shard.frontends.entry import load as load_entry

        if inputs is not None or loss_fn is not None:
            raise InputError("inputs and a loss function are given with a module; an entry point makes its own")
        model, inputs, loss_fn, _ = load_entry(model)
    elif isinstance(model, str):
        from solver_shard.frontends.huggingface import filled_config, load

        if options.batch is None:
            raise InputError(
                f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r} instead of {model!r}"
            )
        config = filled_config(model)
        labels = len(config.get("id2label") or ()) if "image_size" in config else config.get("vocab_size")
        words, batch = config.get("vocab_size"), options.batch // options.microbatches
        dtype = options.dtype or DEFAULT_DTYPE
        wanted = {"labels": not options.forward_only, "checkpoint": options.checkpoint, "weights": True}
        torch.manual_seed(seed)
        model, inputs, _ = load(model, batch=batch, seq=options.seq, dtype=dtype, **wanted)
    if inputs is None:
        raise InputError(f"example inputs for {type(model).__name__} are missing; give what the plan was made with")
    return _pinned(
        plan,
        plan.mesh,
        subject_of(
            model,
            inputs,
            name=name,
            loss_fn=loss_fn,
            forward_only=options.forward_only,
            microbatches=options.microbatches,
            labels=labels,
            words=words,
            seed=seed,
        ),
    )


def _shrunk(plan: Plan, model: str, mesh: Mesh, scale: Fraction | None, seed: int) -> tuple[Subject, list[str]]:
    """A small model of the same kind."""
    from solver_shard.export.shrink import shrink
    from solver_shard.frontends.huggingface import filled_config, load

    options = plan.options
    if options.batch is None:
        raise InputError(
            f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r} instead of {model!r}"
        )
    small = shrink(filled_config(model), plan, mesh, scale)
    torch.manual_seed(seed)
    try:
        module, inputs, _ = load(
            small.config,
            batch=small.batch,
            seq=small.seq,
            labels=not options.forward_only,
            checkpoint=options.checkpoint,
            weights=True,
        )
        subject = subject_of(
            module,
            inputs,
            name=plan.name,
            forward_only=options.forward_only,
            microbatches=min(options.microbatches, 2),
            labels=small.labels,
            words=small.words,
            seed=seed,
        )
    except InputError as error:
        raise InputError(
            f"no small twin of {model!r} can be built: {error}; give a smaller model of your own, package.module:function with the same "
            "names, and --twin; or --no-twin where the model fits into this machine"
        ) from None
    changes = list(small.changes)
    if options.microbatches > 2:
        changes.append(f"microbatches {options.microbatches} -> 2")
    return _pinned(plan, mesh, subject), changes


def _pinned(plan: Plan, mesh: Mesh, subject: Subject) -> Subject:
    """With the identity ops that pins of activations put into a program."""
    program = subject.program
    pins = [parse_pin(text, plan.mesh) for text in plan.options.pins]
    try:
        program, _ = constrain(program, resolve_pins(pins, program, mesh))
    except InputError:  # what is pinned may be cut into more parts than a twin's tensors allow
        return subject
    return dataclasses.replace(subject, program=program)


def _relayed(plan: Plan, subject: Subject) -> Subject:
    """With the relays of the plan in the program, which has places for its pins."""
    return dataclasses.replace(subject, program=constrain(subject.program, {}, plan.relays)[0])


def _carried(plan: Plan, subject: Subject, mesh: Mesh, changes: list[str], *, wide: bool, say: Callable[[str], None]) -> Case:
    dtype = plan.options.dtype or "its own"
    if wide:
        subject = widened(subject)
    say(f"carrying the plan to {mesh}")
    options = dataclasses.replace(
        plan.options, microbatches=len(subject.values), batch=None, seq=None, dtype=None, checkpoint=plan.options.checkpoint
    )
    made = transfer(plan, subject.program, mesh, options)
    if not made.carried:
        raise InputError(f"nothing of the plan of {plan.name!r} can be carried to this model: no tensor or op of it has the same name")
    changes.append(f"floats of {dtype} -> {'f64' if wide else 'f32'}")
    total = made.carried + len(made.left)
    line = f"{made.carried} of {total} decisions carried"
    if made.left:
        line += f"; {len(made.left)} are left to the solver" + (", for instance" if len(made.left) > _LISTED else "")
    return Case(
        plan=made.plan, subject=_relayed(made.plan, subject), changes=(*changes, line, *(f"  {said}" for said in made.left[:_LISTED]))
    )
