"""Run a plan and hold it against the unsharded model and against what the plan predicts.

>>> verdict = verify("plan.json", "gpt2")
>>> print(verdict)
>>> verdict.holds
True

A plan that is small is run as it is. One for a bigger mesh or model is first carried to a small twin
(:mod:`solver_shard.verification.twin`), and the collectives that are compared are those that the evaluator finds for the twin's plan.

Two references stand beside the sharded step. The *graph* is the traced program, run op by op on whole tensors: where the sharded step
departs from it, the plan, a rule or a collective is wrong. The *model* is the module itself with autograd: where only that differs, the
trace is wrong. The optimizer's step is p - rate * g: what is to be seen is that every slice of a gradient meets its slice of the
parameter and that the new values go where the plan wants them, which is the same for every optimizer that works element by element.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from solver_shard.arguments import checked
from solver_shard.costs.model import CostModel
from solver_shard.errors import InternalError
from solver_shard.plan.evaluate import evaluate
from solver_shard.plan.plan import Plan
from solver_shard.program import Program
from solver_shard.runtime.optimizer import squares
from solver_shard.verification.simulate import simulate
from solver_shard.verification.subject import StepResult, Subject
from solver_shard.verification.verdict import TOLERANCES, TensorError, Traffic, Verdict, collectives, differences, planned_traffic

if TYPE_CHECKING:
    from fractions import Fraction


RATE = 0.25
"""Of the step that stands for the optimizer's."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a sharded step returned, put together to whole tensors; as ``StepResult``, with the updated parameters and the collectives."""

    step: StepResult
    parameters: Mapping[str, torch.Tensor]
    traffic: Traffic


@checked
def verify(
    plan: Plan | str | os.PathLike[str],
    model: str | os.PathLike[str] | torch.nn.Module | Program,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    processes: int | None = None,
    twin: bool | None = None,
    scale: str | float | Fraction | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Verdict:
    """Run one step of a plan and compare: outputs, loss, every gradient, the parameters after a step, and the collectives.

    >>> verdict = verify("plan.json", "gpt2")  # doctest: +SKIP
    >>> verdict.holds                          # doctest: +SKIP
    True

    Differences are relative to the largest number of a kind (all gradients, say). The tolerance is 1e-11 where the run computes in f64 and
    2e-4 in f32: what summing in another order changes, about 2^10 roundings, is below it, and a term that is missing or counted twice, of
    the order of 1 / devices, far above.

    Args:
        plan: what ``optimize`` returned, or its file.
        model: what the plan is for, as ``optimize`` takes it; of presets and configs the plan says batch, sequence length and dtype.
        inputs: of a module: example tensors as they were given to ``optimize``.
        loss_fn: of a module: as it was given to ``optimize``.
        processes: run in so many real processes (gloo) on this machine; None simulates all devices in this one.
        twin: carry the plan to a small twin first; None where the plan is not small, or wants another number of processes.
        scale: of a twin's widths and vocabulary, as 0.05 or "1/64"; by default what makes the model about 64 wide.
        seed: of all numbers.
        timeout: seconds for the processes.
        progress: called with a line of text when a stage starts.

    Returns:
        The differences and the collectives beside those that were planned; ``str()`` is the report, ``holds`` whether all of it is right.

    Raises:
        InputError: the model is not the plan's, or something asked for cannot be had; the message says what is legal.
        TraceError: the model cannot be traced.
    """
    from solver_shard.plan.io import load_plan
    from solver_shard.verification.twin import prepare

    say = progress or (lambda line: None)
    given = load_plan(plan)
    case = prepare(
        given,
        os.fspath(model) if isinstance(model, os.PathLike) else model,
        inputs,
        loss_fn=loss_fn,
        processes=processes,
        twin=twin,
        scale=scale,
        seed=seed,
        say=say,
    )
    title = f"{given.name} on {given.mesh.whole}"
    verdict = check(case.plan, case.subject, processes=processes is not None, timeout=timeout, say=say)
    return replace(verdict, plan=title, changes=case.changes, notes=(*case.subject.notes, *verdict.notes))


def check(plan: Plan, subject: Subject, *, processes: bool = False, timeout: float = 300.0, say: Progress | None = None) -> Verdict:
    """Run a plan of exactly this program, with all devices in this process or each in a real one, and compare."""
    say = say or (lambda line: None)
    devices = f"{plan.mesh.size} device{'s' * (plan.mesh.size > 1)} of {plan.mesh}"
    how = f"{devices}, {'each in a process of its own (gloo)' if processes else 'simulated in one process'}"
    verdict = Verdict(plan=plan.name, run=f"{how}, in {narrowest(subject.program)}")
    try:
        evaluate(plan, subject.program, plan.options.rulebook(), CostModel(plan.mesh, plan.cluster, plan.options.overlap))
    except InternalError as error:
        return replace(verdict, problem=str(error))
    say(f"running {len(plan.ops)} ops unsharded")
    graph, reference = subject.of_graph()
    say(f"running {len(plan.ops)} ops on {how}")
    try:
        norm = _norm(graph.gradients) / 2
        ran = run_apart(plan, subject, max_norm=norm, timeout=timeout) if processes else run_simulated(plan, subject, max_norm=norm)
    except InternalError as error:
        return replace(verdict, problem=(not processes and _locate(plan, subject, reference)) or str(error))
    verdict = compare(verdict, plan, subject, ran, graph)
    wrong = any(d.reference == "graph" and not d.holds for d in verdict.differences)
    return replace(verdict, problem=_locate(plan, subject, reference)) if wrong and not processes else verdict


def compare(verdict: Verdict, plan: Plan, subject: Subject, ran: Ran, graph: StepResult) -> Verdict:
    """A verdict with all differences and collectives filled in."""
    norm = "f32" if plan.options.clip else None  # one f32 number, by which all gradients are scaled
    tolerance = TOLERANCES[narrowest(subject.program, plan.options.reduce_dtype, norm)]
    found = _all(plan, subject, ran, graph, "graph", tolerance)
    references = {"graph": f"the graph unsharded, {narrowest(subject.program)}"}
    notes = list(verdict.notes)
    model = subject.of_model()
    if model is not None and model.apart:
        notes.append(f"{model.apart}; they are left out")
    elif model is not None:
        assert subject.model is not None, "a model's step has a model"
        dtype = min((p.dtype for p in subject.model.parameters()), key=lambda d: -torch.finfo(d).eps, default=torch.float32)
        own = _NAMES[dtype]
        own = own if own != "f64" else "f32"  # models that are wide compute parts in f32 still
        references["model"] = f"the model itself, {own}"
        found += _all(plan, subject, ran, model, "model", max(tolerance, TOLERANCES[own]))
    else:
        notes.append("only the graph is known; the model itself is not compared")
    return replace(
        verdict,
        differences=tuple(found),
        collectives=collectives(planned_traffic(plan), ran.traffic),
        references=references,
        notes=tuple(notes),
    )


def run_simulated(plan: Plan, subject: Subject, *, max_norm: float = 1.0) -> Ran:
    """A step with all devices in this process."""
    result = simulate(plan, subject.program, list(subject.values), rate=RATE, max_norm=max_norm, seed=subject.seed)
    names = [subject.program.tensors[t].name for t in subject.program.outputs]
    count = len(names)
    outputs = tuple(dict(zip(names, result.outputs[k * count : (k + 1) * count], strict=True)) for k in range(len(subject.values)))
    return Ran(
        step=StepResult(outputs=outputs, gradients=result.gradients),
        parameters=result.parameters,
        traffic={key: (n, result.nbytes[key]) for key, n in result.collectives.items()},
    )


def run_apart(plan: Plan, subject: Subject, *, max_norm: float, timeout: float) -> Ran:
    """A step with every device in a process of its own."""
    from solver_shard.verification.processes import run_in_processes

    step, parameters, traffic = run_in_processes(plan, subject, rate=RATE, max_norm=max_norm, timeout=timeout)
    return Ran(step=step, parameters=parameters, traffic=traffic)


_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.complex64: "f32",
    torch.complex128: "f64",
}  # fmt: skip
_PARTS = {"c64": "f32", "c128": "f64"}
"""What complex numbers are made of."""


def narrowest(program: Program, *more: str | None) -> str:
    """The narrowest float of a program, and of others that are given."""
    floats = {_PARTS.get(tensor.dtype, tensor.dtype) for tensor in program.tensors} | set(more)
    return next((dtype for dtype in ("bf16", "f16", "f32", "f64") if dtype in floats), "f32")


def _all(plan: Plan, subject: Subject, ran: Ran, expected: StepResult, reference: str, tolerance: float) -> list[TensorError]:
    """Every tensor that a step returns, against one reference."""
    gradients = {name: _wide(g) for name, g in expected.gradients.items()}
    if plan.options.clip and ran.parameters:
        norm = _norm(gradients)
        gradients = {name: g * min(1.0, norm / 2 / (norm + 1e-6)) for name, g in gradients.items()}
    found = []
    for k, (outputs, made) in enumerate(zip(expected.outputs, ran.step.outputs, strict=True)):
        said = f" of microbatch {k}" if len(ran.step.outputs) > 1 else ""
        for kind in ("loss", "output"):
            chosen = {name: value for name, value in outputs.items() if (name == "loss") == (kind == "loss")}
            found += differences(
                kind, reference, {f"{n}{said}": v for n, v in made.items()}, {f"{n}{said}": v for n, v in chosen.items()}, tolerance
            )
    found += differences("gradient", reference, ran.step.gradients, gradients, tolerance)
    if plan.options.optimizer == "none" or plan.options.forward_only:
        return found
    whole = {subject.program.tensors[p].name: subject.values[0][p] for p in subject.program.gradients}
    stepped = {name: _wide(value) - RATE * gradients[name] for name, value in whole.items()}
    return found + differences("parameter", reference, ran.parameters, stepped, tolerance)


def _norm(gradients: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(squares(g, torch.float64).item() for g in gradients.values()))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _locate(plan: Plan, subject: Subject, reference: tuple[dict[int, torch.Tensor], ...]) -> str:
    """The first op whose result is not what the unsharded graph has there; empty where all are."""
    tolerance = TOLERANCES[narrowest(subject.program)]
    try:
        simulate(
            plan,
            subject.program,
            list(subject.values),
            reference=reference,
            tolerance=tolerance,
            absolute=tolerance * 1e-3,
            seed=subject.seed,
        )
    except InternalError as error:
        return str(error)
    return ""
