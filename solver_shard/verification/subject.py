"""A model with numbers: weights and inputs of one step, the unsharded step in two ways, and the program that a plan is for.

>>> subject = subject_of(model, inputs, name="mlp", loss_fn=loss, seed=0)
>>> subject.of_model().outputs[0]["loss"], subject.of_graph()[0].outputs[0]["loss"]
(tensor(1.0421), tensor(1.0421))

Numbers must be able to show a mistake. A bias of zeros that is added four times is still right, and so is a mean over rows that
are all alike: so what is the same number everywhere (biases, scales of norms, example inputs of zeros) is stirred, and some labels
are left out of the loss, so that devices do not have equal parts of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solver_shard.errors import InputError
from solver_shard.ops.random import Unsharded, draws
from solver_shard.ops.run import DTYPES, run
from solver_shard.ops.shards import plain
from solver_shard.plan.plan import Plan
from solver_shard.program import Program, Role
from solver_shard.tracing.clean import clean
from solver_shard.tracing.torch import Inputs, named_tensors, run_eagerly, trace_raw

Values = Mapping[int, torch.Tensor]

IGNORED = -100
"""A label that cross entropy leaves out."""

_STIR = 0.1
_WIDE = {"f32": "f64", "bf16": "f64", "f16": "f64", "c64": "c128"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an unsharded step returns; the mean over microbatches of gradients.

    Attributes:
        outputs: by name, microbatch after microbatch.
        gradients: by parameter name.
        apart: why the numbers cannot be those of the program; empty where they can.
    """

    outputs: tuple[Mapping[str, torch.Tensor], ...]
    gradients: Mapping[str, torch.Tensor]
    apart: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A program and values for its sources.

    Attributes:
        values: by position in the program, one mapping for each microbatch; parameters are the same in all.
        model: with these weights; None where only the program is known.
        inputs: as the model takes them, of which ``values`` has the tensors.
        seed: of what the step draws; microbatches are its steps.
        notes: what is not as the user gave it.
    """

    program: Program
    values: tuple[Values, ...]
    model: nn.Module | None = None
    inputs: Inputs | None = None
    loss_fn: Callable[..., Any] | None = None
    forward_only: bool = False
    seed: int = 0
    notes: tuple[str, ...] = ()

    def tensors(self, microbatch: int = 0) -> dict[str, torch.Tensor]:
        """Values of the inputs of one microbatch by name."""
        return {
            self.program.tensors[t].name: value
            for t, value in self.values[microbatch].items()
            if self.program.tensors[t].role is Role.INPUT
        }

    def of_graph(self) -> tuple[StepResult, tuple[dict[int, torch.Tensor], ...]]:
        """The step by the program, op by op and unsharded; and every tensor of it by position."""
        found = tuple(run(self.program, values, seed=self.seed, step=k) for k, values in enumerate(self.values))
        tensors = self.program.tensors
        gradients = {tensors[p].name: torch.stack([made[g] for made in found]).mean(0) for p, g in self.program.gradients.items()}
        outputs = tuple({tensors[t].name: made[t] for t in self.program.outputs} for made in found)
        return StepResult(outputs=outputs, gradients=gradients), found

    def of_model(self) -> StepResult | None:
        """The step by the model itself and autograd; None where there is no model."""
        if self.model is None or self.inputs is None:
            return None
        state = {k: v.detach().clone() for k, v in self.model.state_dict(keep_vars=True).items()}
        self.model.zero_grad()
        outputs, apart = [], ""
        for k in range(len(self.values)):
            with torch.set_grad_enabled(not self.forward_only), Unsharded(self.seed, k) as random:
                found = run_eagerly(self.model, self.inputs, self.given(k), loss_fn=self.loss_fn, forward_only=self.forward_only)
                if not self.forward_only:
                    (found["loss"] / len(self.values)).backward()
            apart = apart or _apart(random.drawn, draws(self.program))
            outputs.append({name: value.detach() for name, value in found.items()})
        named = dict(self.model.named_parameters(remove_duplicate=False))
        trained = [self.program.tensors[p].name for p in self.program.gradients]
        gradients = {name: torch.zeros_like(named[name]) if (g := named[name].grad) is None else g.detach().clone() for name in trained}
        self.model.zero_grad()
        with torch.no_grad():  # a step moves the statistics of some norms
            for name, value in self.model.state_dict(keep_vars=True).items():
                value.detach().copy_(state[name])
        return StepResult(outputs=tuple(outputs), gradients=gradients, apart=apart)

    def given(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The inputs of a microbatch by the names that they have outside the program."""
        assert self.model is not None, "asked of a model only"
        assert self.inputs is not None, "asked of a model only"
        tensors = self.tensors(microbatch)
        written = {self.program.tensors[s].name for t in self.program.outputs for s in self.program.written(t)}
        tensors |= {name: tensors[name].clone() for name in written & tensors.keys()}  # the model writes into them
        return {
            name: tensors.get(name, tensors.get(f"input.{name}", given)).to(given.dtype)  # where the program is widened, it is not
            for name, given in named_tensors(self.model, self.inputs).items()
        }


def model_of(
    plan: Plan, model: str | nn.Module, inputs: Inputs | None, loss_fn: Callable[..., Any] | None, *, weights: bool, seed: int
) -> tuple[nn.Module, Inputs, Callable[..., Any] | None, Mapping[str, int | None]]:
    """The model that a plan is for, as the user gives it: module, inputs, loss, and below which whole numbers of some inputs are drawn.

    Args:
        weights: presets and configs are made with values, drawn with this seed; else on the meta device.

    Raises:
        InputError: something is missing, or given where the model makes its own.
    """
    from solver_shard.tracing.load import DEFAULT_DTYPE, is_entry_point, load_entry

    options = plan.options
    limits: dict[str, int | None] = {}
    if isinstance(model, str) and is_entry_point(model):
        if inputs is not None or loss_fn is not None:
            raise InputError("inputs and a loss function are given with a module; an entry point makes its own")
        model, inputs, loss_fn, _ = load_entry(model)
    elif isinstance(model, str):
        from solver_shard.tracing.huggingface import filled_config, load

        if options.batch is None:
            raise InputError(
                f"the plan was not made from a preset or config; give the module or entry point of {plan.name!r} instead of {model!r}"
            )
        config = filled_config(model)
        words = config.get("vocab_size")
        limits = {"input_ids": words, "labels": len(config.get("id2label") or ()) if "image_size" in config else words}
        batch, dtype = options.batch // options.microbatches, options.dtype or DEFAULT_DTYPE
        wanted = {"labels": not options.forward_only, "checkpoint": options.checkpoint, "weights": weights}
        torch.manual_seed(seed)
        model, inputs, _ = load(model, batch=batch, seq=options.seq, dtype=dtype, **wanted)
    if inputs is None:
        raise InputError(f"example inputs for {type(model).__name__} are missing; give what the plan was made with")
    return model, inputs, loss_fn, limits


def subject_of(
    model: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    loss_fn: Callable[..., Any] | None = None,
    forward_only: bool = False,
    microbatches: int = 1,
    labels: int | None = None,
    words: int | None = None,
    seed: int = 0,
) -> Subject:
    """Trace a model and give it numbers; the model gets them too.

    Args:
        labels, words: whole-number inputs called so, or ``input_ids``, are drawn below these; others are taken as they are.

    Raises:
        InputError: the inputs do not fit.
        TraceError: the model cannot be traced.
    """
    raw = trace_raw(model, inputs, name=name, loss_fn=loss_fn, forward_only=forward_only)
    program = clean(raw)
    numbers = torch.Generator().manual_seed(seed)
    notes = _fill(model, numbers)
    held: dict[str, torch.Tensor] = dict(raw.constants)
    held |= dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    given = named_tensors(model, inputs)
    sources: list[Values] = []
    for k in range(microbatches):
        values: dict[int, torch.Tensor] = {}
        for t in program.sources():
            tensor = program.tensors[t]
            if tensor.role is Role.INPUT:
                own = given.get(tensor.name, given.get(tensor.name.removeprefix("input.")))
                assert own is not None, f"{tensor.name} is not among the inputs that were traced"
                limit = {"labels": labels, "input_ids": words}.get(tensor.name)
                values[t] = sources[0][t] if k and _fixed(own, limit) else example_value(tensor.name, own, limit, numbers)
            elif tensor.name in held:
                values[t] = plain(held[tensor.name])
            else:
                raise InputError(
                    f"the value of {tensor.name!r}, a tensor that {name!r} makes from values while it runs, is not known; register it as a "
                    "buffer"
                )
        sources.append(values)
    return Subject(
        program=program,
        values=tuple(sources),
        model=model,
        inputs=inputs,
        loss_fn=loss_fn,
        forward_only=forward_only,
        seed=seed,
        notes=tuple(notes),
    )


def of_program(program: Program, *, microbatches: int = 1, seed: int = 0) -> Subject:
    """Numbers for a program whose model is not known: whole numbers are zeros, all else is drawn."""
    numbers = torch.Generator().manual_seed(seed)
    sources: list[Values] = []
    for k in range(microbatches):
        values = {}
        for t in program.sources():
            tensor = program.tensors[t]
            again = k and tensor.role is not Role.INPUT
            values[t] = sources[0][t] if again else _drawn(tensor.shape, DTYPES[tensor.dtype], numbers)
        sources.append(values)
    return Subject(program=program, values=tuple(sources), seed=seed)


def widened(subject: Subject) -> Subject:
    """The same in 64-bit floats, in which the order of sums does not matter; the model itself stays as it is."""
    return dataclasses.replace(
        subject,
        program=widened_program(subject.program),
        values=tuple({t: _widened_tensor(value) for t, value in values.items()} for values in subject.values),
    )


def widened_program(program: Program) -> Program:
    """The program with f64 in place of all other floats."""
    tensors = tuple(dataclasses.replace(t, dtype=_WIDE.get(t.dtype, t.dtype)) for t in program.tensors)
    ops = tuple(dataclasses.replace(op, attributes={k: _widened(k, v) for k, v in op.attributes.items()}) for op in program.ops)
    return dataclasses.replace(program, tensors=tensors, ops=ops)


def _widened(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_widened(name, item) for item in value)
    return _WIDE.get(value, value) if isinstance(value, str) and "dtype" in name else value


def _widened_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128) if value.is_complex() else value.double() if value.is_floating_point() else value


def _apart(model: Sequence[Sequence[int]], program: Sequence[Sequence[int]]) -> str:
    """How the draws of a model's own step differ from those of its trace, by their shapes; empty where they do not."""
    if list(map(tuple, model)) == list(map(tuple, program)):
        return ""
    first = next((k for k, (a, b) in enumerate(zip(model, program, strict=False)) if tuple(a) != tuple(b)), min(len(model), len(program)))
    said = [str(list(found[first])) if first < len(found) else "none" for found in (model, program)]
    return (
        f"the model draws otherwise than its trace (draw {first} has shape {said[0]} in the model, {said[1]} in the trace), so its own "
        "numbers are not comparable"
    )


def _fill(model: nn.Module, numbers: torch.Generator) -> list[str]:
    """Numbers for weights that have none, and noise on those that are all alike."""
    empty = [name for name, value in _state(model) if value.device.type == "meta"]
    if empty:
        model.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in _state(model):
            if name in empty:
                value.copy_(_drawn(value.shape, value.dtype, numbers, scale=value.shape[-1] ** -0.5 if value.ndim > 1 else 1.0))
                if isinstance(value, nn.Parameter) or not value.is_floating_point():
                    continue
                value.abs_()  # a running variance, a table of frequencies
            elif isinstance(value, nn.Parameter) and value.is_floating_point() and _alike(value):
                value.add_(_drawn(value.shape, value.dtype, numbers, scale=_STIR))
    return [f"{len(empty)} weights and buffers without values were drawn"] if empty else []


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _fixed(given: torch.Tensor, limit: int | None) -> bool:
    """Whether an input is the same in every microbatch: whole numbers of which nobody said what may stand for them."""
    return not given.is_floating_point() and limit is None


def example_value(name: str, given: torch.Tensor, limit: int | None, numbers: torch.Generator) -> torch.Tensor:
    """What stands for an input: itself where it says something; whole numbers with a limit are drawn below it."""
    real = given.device.type != "meta" and not isinstance(given, torch._subclasses.FakeTensor)
    if given.is_floating_point() or given.is_complex():
        return plain(given).clone() if real and not _alike(given) else _drawn(given.shape, given.dtype, numbers)
    if limit is None:
        return given.detach().clone() if real else torch.zeros(given.shape, dtype=given.dtype)
    made = torch.randint(limit, given.shape, dtype=given.dtype, generator=numbers)
    if name == "labels" and made.ndim > 1:
        made[0, : made.shape[1] // 2] = IGNORED
    return made


def _alike(value: torch.Tensor) -> bool:
    return value.numel() > 1 and bool((value == value.reshape(-1)[0]).all())


def _drawn(shape: Sequence[int], dtype: torch.dtype, numbers: torch.Generator, *, scale: float = 1.0) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return (torch.randn(tuple(shape), dtype=kind, generator=numbers) * scale).to(dtype)
    return torch.zeros(tuple(shape), dtype=dtype)
